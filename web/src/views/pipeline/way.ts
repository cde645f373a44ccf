// The way of one input through one layer, as the document tells it.
import type { Example, HeadDocument, Token } from "../../document";
import type { Matrix } from "../../draw/cells";
import { plain } from "../../draw/tokens";

export interface Way {
  /** the attention that is shown, and its heads as indexes into the document's heads */
  site: string;
  heads: number[];
  /** whether other layers come before it */
  later: boolean;
  /** tokens as shown, and whether there are more than that */
  tokens: string[];
  length: number;
  ids: number[];
  embedding: Part | null;
  positions: Part | null;
  input: Part | null;
  query: Part[];
  key: Part[];
  value: Part[];
  /** before the softmax, with masks (null) and biases; empty where the model hides them */
  scores: Matrix[];
  weights: Matrix[];
  outputs: Part[];
  joined: Part | null;
  projected: Part | null;
  /** true shapes by step */
  shapes: Record<string, number[]>;
}

// So many channels of each head are drawn, and of the model's width.
const NARROW = 8;
const WIDE = 32;

/** What is shown of a matrix: its first channels. */
export interface Part {
  values: Matrix;
  /** how many columns it truly has */
  columns: number;
}

/** Reads the steps of an example; null if it has none. */
export function way(document: HeadDocument, example: Example): Way | null {
  const steps = new Map((example.pipeline ?? []).map((step) => [step.step, step]));
  const weights = steps.get("weights");
  if (!weights) return null;
  const site = weights.site ?? example.maps.find((map) => map.queries === map.keys)?.site ?? "";
  const all = document.heads;
  const heads = all.site.flatMap((name, index) => (name === site ? [index] : []));
  const words = (steps.get("tokens")?.values ?? []) as string[];
  const known: Token[] = example.tokens["self"] ?? [];
  const perHead = (name: string): Part[] => {
    const step = steps.get(name);
    return step ? (step.values as Matrix[]).map((values) => part(values, step.shape.at(-1)!, NARROW)) : [];
  };
  const flat = (name: string) => {
    const step = steps.get(name);
    return step ? part(step.values as Matrix, step.shape.at(-1)!, WIDE) : null;
  };
  const outputs = perHead("heads");
  const width = steps.get("joined")?.shape.at(-1) ?? 0;
  const stack = document.stacks.find((one) => one.layers.some((layer) => layer.site === site));
  const later = stack !== undefined && stack.layers[0]!.site !== site;
  return {
    site,
    heads,
    later,
    tokens: words.map((word, i) => (known[i] ? plain(known[i], 12) : word)),
    length: steps.get("tokens")?.shape[0] ?? words.length,
    ids: (steps.get("ids")?.values ?? []) as number[],
    // of a later layer they are not what it reads
    embedding: later ? null : flat("embedding"),
    positions: later ? null : flat("positions"),
    input: flat("input"),
    query: perHead("query"),
    key: perHead("key"),
    value: perHead("value"),
    scores: (steps.get("scores")?.values ?? []) as Matrix[],
    weights: weights.values as Matrix[],
    outputs,
    joined: outputs.length ? { values: sideBySide(outputs), columns: width } : null,
    projected: flat("projected"),
    shapes: Object.fromEntries([...steps.values()].map((step) => [step.step, step.shape])),
  };
}

function part(values: Matrix, columns: number, most: number): Part {
  return { values: values.map((row) => row.slice(0, most)), columns };
}

/** The first channels of every head beside each other: what is drawn of the joined heads. */
function sideBySide(outputs: Part[]): Matrix {
  return outputs[0]!.values.map((_, row) => outputs.flatMap((one) => one.values[row] ?? []));
}

/** Which key/value head serves a head: with fewer of them, neighbours share one. */
export function shared(head: number, heads: number, kvHeads: number): number {
  return Math.floor((head * kvHeads) / heads);
}
