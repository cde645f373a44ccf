// The way of one input through one layer, as the document tells it.
import type { Example, HeadDocument, PipelineStep, Token } from "../../document";
import type { Matrix } from "../../draw/cells";
import { plain } from "../../draw/tokens";

export interface Way {
  /** the attention that is shown, and its heads as indexes into the document's heads */
  site: string;
  heads: number[];
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
  weights: Matrix[];
  outputs: Part[];
  joined: Part | null;
  projected: Part | null;
  /** true shapes by step */
  shapes: Record<string, number[]>;
}

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
    return step ? (step.values as Matrix[]).map((values) => ({ values, columns: step.shape.at(-1)! })) : [];
  };
  const flat = (name: string) => part(steps.get(name));
  return {
    site,
    heads,
    tokens: words.map((word, i) => (known[i] ? plain(known[i], 12) : word)),
    length: steps.get("tokens")?.shape[0] ?? words.length,
    ids: (steps.get("ids")?.values ?? []) as number[],
    embedding: flat("embedding"),
    positions: flat("positions"),
    input: flat("input"),
    query: perHead("query"),
    key: perHead("key"),
    value: perHead("value"),
    weights: weights.values as Matrix[],
    outputs: perHead("heads"),
    joined: flat("joined"),
    projected: flat("projected"),
    shapes: Object.fromEntries([...steps.values()].map((step) => [step.step, step.shape])),
  };
}

function part(step: PipelineStep | undefined): Part | null {
  return step ? { values: step.values as Matrix, columns: step.shape.at(-1)! } : null;
}

/** Which key/value head serves a head: with fewer of them, neighbours share one. */
export function shared(head: number, heads: number, kvHeads: number): number {
  return Math.floor((head * kvHeads) / heads);
}
