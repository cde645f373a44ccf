// Heads as small drawings, layer by layer: for pictures and alignments.
import { svg, type Child } from "../draw/element";
import { grid, type Cell, type Grid } from "../draw/grid";
import type { Page } from "../page";
import { title } from "./heads";

export interface TilesOptions {
  page: Page;
  label: string;
  /** heads that have a drawing, by layer */
  layers: { layer: number; heads: number[] }[];
  width: number;
  height: number;
  content: (head: number) => Child[];
  tip: (head: number) => Child[];
  pick: (head: number) => void;
}

export function tiles(options: TilesOptions): { drawing: SVGSVGElement; grid: Grid } {
  const { page, layers, width, height } = options;
  const { document, words } = page;
  const numbers = document.heads.head;
  const left = 30;
  const top = 18;
  const gap = 5;
  const columns = 1 + Math.max(0, ...layers.flatMap((layer) => layer.heads.map((head) => numbers[head]!)));
  const size = { width: left + columns * (width + gap), height: top + layers.length * (height + gap) };
  const labels = svg("g", { class: "axis", "aria-hidden": "true" });
  for (let column = 0; column < columns; column++)
    labels.append(svg("text", { x: left + column * (width + gap) + width / 2, y: top - 6, "text-anchor": "middle" }, column));
  const cells: Cell[] = [];
  for (const [row, layer] of layers.entries()) {
    const y = top + row * (height + gap);
    labels.append(svg("text", { x: left - 8, y: y + height / 2, "text-anchor": "end", "dominant-baseline": "central" }, layer.layer));
    for (const head of layer.heads)
      cells.push({ head, row, column: numbers[head]!, x: left + numbers[head]! * (width + gap), y, width, height, label: title(document, head, words) });
  }
  const made = grid({ page, label: options.label, cells, content: (cell) => options.content(cell.head), tip: options.tip, pick: options.pick });
  const drawing = svg("svg", { viewBox: `0 0 ${size.width} ${size.height}`, width: size.width, class: "tiles", role: "group", "aria-label": options.label }, labels, made.element);
  return { drawing, grid: made };
}
