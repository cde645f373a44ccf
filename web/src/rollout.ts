// How attention adds up: what each token receives in one head or one layer, and attention rollout through all layers
// (Abnar and Zuidema, 2020).
import { unverified } from "./doubts";
import type { Example, HeadDocument, Layer } from "./document";
import { attention, type Attention, type Weights } from "./maps";
import type { Words } from "./words";

/** How much attention each key gets: from one query, or from all of them on average (query -1). Pooled where it is not exact. */
export function received(seen: Attention, query: number): number[] {
  const found = new Array<number>(seen.keys.length).fill(0);
  const weights = seen.exact ?? seen.pooled;
  if (!weights) return found;
  const [rowSize, columnSize] = seen.exact ? [1, 1] : [seen.rowSize, seen.columnSize];
  return rowMean(weights, query < 0 ? -1 : Math.floor(query / rowSize), found.length, columnSize);
}

/** One row of the weights, or the mean of all (row -1), as shares of the keys. */
export function rowMean(weights: Weights, row: number, keys = weights.columns, columnSize = 1): number[] {
  const found = new Array<number>(keys).fill(0);
  const chosen = row < 0 ? [...Array(weights.rows).keys()] : [row];
  for (const one of chosen)
    for (let key = 0; key < keys; key++) found[key]! += weights.at(one, Math.floor(key / columnSize)) / columnSize / chosen.length;
  return found;
}

/** The mean of the exact maps of a layer's heads; null if one of them is missing. */
export function layerMean(document: HeadDocument, example: Example, layer: Layer): Weights | null {
  let sum: Float64Array | undefined;
  let [rows, columns] = [0, 0];
  for (const head of layer.heads) {
    const exact = attention(document, example, head)?.exact;
    if (!exact) return null;
    sum ??= new Float64Array(exact.rows * exact.columns);
    [rows, columns] = [exact.rows, exact.columns];
    for (let row = 0, at = 0; row < rows; row++) for (let column = 0; column < columns; column++, at++) sum[at]! += exact.at(row, column) / layer.heads.length;
  }
  return sum ? weightsOf(sum, rows, columns) : null;
}

function weightsOf(values: Float64Array, rows: number, columns: number): Weights {
  return { rows, columns, at: (row, column) => values[row * columns + column]! };
}

export type NoRollout = keyof Words["rolloutMissing"];

const computed = new WeakMap<Example, Weights>();

/** Rollout through the layers that read the tokens of a head, or why there is none. */
export function rollout(document: HeadDocument, example: Example, head: number): Weights | NoRollout {
  const map = example.maps.find((one) => one.site === document.heads.site[head]);
  if (!map || map.queries !== map.keys) return "axes";
  const sites = new Set(example.maps.filter((one) => one.queries === map.queries).map((one) => one.site));
  const stacks = document.stacks.filter((stack) => stack.layers.some((layer) => sites.has(layer.site)));
  // one stack of self-attention that the example saw from end to end; a decoder that also reads a source has two
  if (stacks.length !== 1 || stacks[0]!.kind === "cross" || !stacks[0]!.layers.every((layer) => sites.has(layer.site))) return "axes";
  const { layers } = stacks[0]!;
  if (layers.some((layer) => layer.heads.some((one) => unverified(document, one)))) return "doubtful";
  const before = computed.get(example);
  if (before) return before;
  let joint: Float64Array | undefined;
  let length = 0;
  for (const layer of layers) {
    const mean = layerMean(document, example, layer);
    if (!mean) return "exact";
    if (mean.rows !== mean.columns || (joint && mean.rows !== length)) return "axes";
    length = mean.rows;
    joint = through(mean, joint, length);
  }
  const weights = weightsOf(joint!, length, length);
  computed.set(example, weights);
  return weights;
}

/** (A + I) / 2 times what was joined below; (length, length). */
function through(layer: Weights, below: Float64Array | undefined, length: number): Float64Array {
  const joint = new Float64Array(length * length);
  for (let row = 0; row < length; row++)
    for (let middle = 0; middle < length; middle++) {
      const weight = 0.5 * layer.at(row, middle) + (row === middle ? 0.5 : 0);
      if (!below) joint[row * length + middle] = weight;
      else if (weight) for (let key = 0; key < length; key++) joint[row * length + key]! += weight * below[middle * length + key]!;
    }
  return joint;
}
