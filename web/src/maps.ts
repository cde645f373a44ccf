// The attention of one head on one example: exact where the document has it, pooled otherwise.
import { unpack, type Example, type HeadDocument, type Maps, type Token } from "./document";

export interface Weights {
  rows: number;
  columns: number;
  /** the weight of a query (row) on a key (column) */
  at(row: number, column: number): number;
}

export interface Attention {
  queries: Token[];
  keys: Token[];
  /** one row for each query, one column for each key; null where the report had no room */
  exact: Weights | null;
  /** blocks: the mean over their queries of the sum over their keys; null for short inputs */
  pooled: Weights | null;
  /** how many queries and keys are one row and one column of `pooled` */
  rowSize: number;
  columnSize: number;
}

function mapsOf(document: HeadDocument, example: Example | undefined, head: number): Maps | undefined {
  const site = document.heads.site[head];
  return example?.maps.find((map) => map.site === site);
}

function slice(values: ArrayLike<number>, start: number, rows: number, columns: number, scale: number): Weights {
  return { rows, columns, at: (row, column) => values[start + row * columns + column]! * scale };
}

/** The map as a picture of at most 48 x 48 means, from 0 to 1 in parts of the largest of them (`peak`). */
export function thumbnail(
  document: HeadDocument,
  example: Example | undefined,
  head: number,
): { weights: Weights; peak: number } | null {
  const maps = mapsOf(document, example, head);
  const number = document.heads.head[head]!;
  if (!maps || number >= (maps.thumbnails.shape[0] ?? 0)) return null;
  const [, rows = 0, columns = 0] = maps.thumbnails.shape;
  const values = unpack(maps.thumbnails);
  return { weights: slice(values, number * rows * columns, rows, columns, 1 / 255), peak: maps.peak[number] ?? 1 };
}

/** The attention of a head on an example, or null if its site was not called there. */
export function attention(document: HeadDocument, example: Example | undefined, head: number): Attention | null {
  const maps = mapsOf(document, example, head);
  if (!example || !maps) return null;
  const queries = example.tokens[maps.queries] ?? [];
  const keys = example.tokens[maps.keys] ?? [];
  const number = document.heads.head[head]!;
  const packed = maps.exact[String(number)];
  const [rows = 0, columns = 0] = packed?.shape ?? [];
  const exact = packed ? slice(unpack(packed), 0, rows, columns, packed.dtype === "float32" ? 1 : 1 / 65535) : null;
  let pooled: Weights | null = null;
  if (maps.pooled) {
    const [, height = 0, width = 0] = maps.pooled.shape;
    pooled = slice(unpack(maps.pooled), number * height * width, height, width, 1 / 255);
  }
  return { queries, keys, exact, pooled, rowSize: maps.row_size ?? 1, columnSize: maps.column_size ?? 1 };
}

/** At most `most` rows and columns: blocks become their largest weight, so that nothing strong disappears. */
export function pool(weights: Weights, most: number): { weights: Weights; rowSize: number; columnSize: number } {
  const rowSize = Math.ceil(weights.rows / most);
  const columnSize = Math.ceil(weights.columns / most);
  if (rowSize <= 1 && columnSize <= 1) return { weights, rowSize: 1, columnSize: 1 };
  const rows = Math.ceil(weights.rows / rowSize);
  const columns = Math.ceil(weights.columns / columnSize);
  const values = new Float32Array(rows * columns);
  for (let row = 0; row < weights.rows; row++) {
    const start = Math.floor(row / rowSize) * columns;
    for (let column = 0; column < weights.columns; column++) {
      const at = start + Math.floor(column / columnSize);
      const weight = weights.at(row, column);
      if (weight > values[at]!) values[at] = weight;
    }
  }
  return { weights: slice(values, 0, rows, columns, 1), rowSize, columnSize };
}
