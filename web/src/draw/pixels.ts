// Maps as pictures: one pixel for one weight, which the browser enlarges.
import type { Colours } from "./colour";
import { html } from "./element";

/** A picture (rows x columns) whose pixel is the colour of value(row, column), a share from 0 to 1, as a data URL. */
export function picture(
  rows: number,
  columns: number,
  value: (row: number, column: number) => number,
  colours: Colours,
): string {
  return coloured(columns, rows, [{ left: 0, top: 0, rows, columns, value }], colours).toDataURL("image/png");
}

/** One map on a sheet: where it lies, and its values from 0 to 1. */
export interface Tile {
  x: number;
  y: number;
  width: number;
  height: number;
  rows: number;
  columns: number;
  value: (row: number, column: number) => number;
  /** 1 unless it stands back */
  opacity?: number;
}

/** Many maps on one canvas, under the drawing that says what they are: a hundred pictures would each be encoded and decoded. */
export interface Sheet {
  element: HTMLElement;
  paint(tiles: Tile[]): void;
}

/** What lies under a drawing, as a picture for its saved file. */
export const under = new WeakMap<SVGSVGElement, () => string>();
const SAVED = 4; // pixels of that picture for one of the page

export function sheet(drawing: SVGSVGElement, colours: Colours): Sheet {
  const { width, height } = drawing.viewBox.baseVal;
  const canvas = html("canvas", { "aria-hidden": "true", "data-painted": 0 });
  const draw = (onto: HTMLCanvasElement, tiles: Tile[], scale: number) => {
    onto.width = Math.round(width * scale);
    onto.height = Math.round(height * scale);
    const context = onto.getContext("2d")!;
    const across = Math.ceil(Math.sqrt(tiles.length));
    const [wide, high] = [Math.max(1, ...tiles.map((one) => one.columns)), Math.max(1, ...tiles.map((one) => one.rows))];
    const parts = tiles.map((one, i) => ({ ...one, left: (i % across) * wide, top: Math.floor(i / across) * high }));
    const all = coloured(across * wide, Math.ceil(tiles.length / Math.max(1, across)) * high, parts, colours);
    for (const { x, y, left, top, rows, columns, opacity = 1, ...one } of parts) {
      if (!rows || !columns) continue;
      context.imageSmoothingEnabled = one.width * scale < columns || one.height * scale < rows;
      context.globalAlpha = opacity;
      context.drawImage(all, left, top, columns, rows, x * scale, y * scale, one.width * scale, one.height * scale);
    }
  };
  return {
    element: html("div", { class: "sheet" }, canvas, drawing),
    paint(tiles) {
      draw(canvas, tiles, Math.max(1, window.devicePixelRatio));
      canvas.dataset["painted"] = String(Number(canvas.dataset["painted"]) + 1);
      under.set(drawing, () => {
        const large = document.createElement("canvas");
        draw(large, tiles, SAVED);
        return large.toDataURL("image/png");
      });
    },
  };
}

interface Part {
  left: number;
  top: number;
  rows: number;
  columns: number;
  value: (row: number, column: number) => number;
}

function coloured(width: number, height: number, parts: Part[], colours: Colours): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  if (!width || !height) return canvas;
  const context = canvas.getContext("2d")!;
  const data = context.createImageData(width, height);
  const pixels = new Uint32Array(data.data.buffer);
  for (const { left, top, rows, columns, value } of parts)
    for (let row = 0; row < rows; row++)
      for (let column = 0, at = (top + row) * width + left; column < columns; column++, at++)
        pixels[at] = colours.pixels[Math.round(255 * Math.min(1, Math.max(0, value(row, column))))]!;
  context.putImageData(data, 0, 0);
  return canvas;
}
