// Maps as pictures: one pixel for one weight, which the browser enlarges. A picture inside an SVG is exported with it.
import type { Colours } from "./colour";

/** A picture (rows x columns) whose pixel is the colour of value(row, column), a share from 0 to 1, as a data URL. */
export function picture(
  rows: number,
  columns: number,
  value: (row: number, column: number) => number,
  colours: Colours,
): string {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d")!;
  const data = context.createImageData(columns, rows);
  const pixels = new Uint32Array(data.data.buffer);
  for (let row = 0, at = 0; row < rows; row++)
    for (let column = 0; column < columns; column++, at++)
      pixels[at] = colours.pixels[Math.round(255 * Math.min(1, Math.max(0, value(row, column))))]!;
  context.putImageData(data, 0, 0);
  return canvas.toDataURL("image/png");
}
