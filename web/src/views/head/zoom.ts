// Long inputs: which window of queries and keys is drawn exactly.

/** inputs up to this many tokens are drawn as a whole, longer ones through a window of this size */
export const SHORT = 40;

export interface Zoom {
  /** first query and first key of the window */
  row: number;
  column: number;
}

/** Where the window begins that has (row, column) in its middle and stays within the map. */
export function around(row: number, column: number, rows: number, columns: number): Zoom {
  const start = (middle: number, length: number) => Math.max(0, Math.min(Math.round(middle - SHORT / 2), length - SHORT));
  return { row: start(row, rows), column: start(column, columns) };
}

/** A position as it is written: counted from 0, as everywhere in manyheads. */
export function at(place: number): string {
  return `#${place}`;
}
