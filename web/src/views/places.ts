// Where every head's map stands: in its layer, at its number, stack under stack, with the labels around.
import { svg } from "../draw/element";
import type { Cell } from "../draw/grid";
import { textWidth } from "../draw/tokens";
import type { Tile } from "../draw/pixels";
import type { Example } from "../document";
import { thumbnail } from "../maps";
import type { Page } from "../page";
import { title } from "./heads";

export interface Room {
  /** pixels there are, and how many of them the layers' numbers take */
  width: number;
  left: number;
  smallest: number;
  largest: number;
  gap: number;
}

export interface Places {
  cells: Cell[];
  labels: SVGGElement;
  /** the numbers of the heads above the columns, for a line of their own that stays in view */
  numbers: { x: number; text: string }[];
  /** of one map */
  size: number;
  width: number;
  height: number;
}

export function placed({ document, words }: Page, example: Example | undefined, { width, left, smallest, largest, gap }: Room): Places {
  const stacks = document.stacks.filter((stack) => stack.layers.some((layer) => example?.maps.some((map) => map.site === layer.site)));
  const numberOf = (head: number) => document.heads.head[head]!;
  const columns = Math.max(1, ...stacks.flatMap((stack) => stack.layers.flatMap((layer) => layer.heads.map((head) => numberOf(head) + 1))));
  const size = Math.max(smallest, Math.min(largest, Math.floor((width - left) / columns) - gap));
  const at = (column: number) => left + column * (size + gap);
  const labels = svg("g", { class: "axis", "aria-hidden": "true" });
  const cells: Cell[] = [];
  let y = 0;
  let row = 0;
  let named = 0;
  const numbers: Places["numbers"] = [];
  for (const stack of stacks) {
    if (document.stacks.length > 1) {
      y += 14;
      const name = `${words.kinds[stack.kind] ?? stack.kind} · ${stack.name}`;
      labels.append(svg("text", { x: 0, y, class: "stack" }, name));
      named = Math.max(named, 1.1 * textWidth(name, 12)); // it is bold
      y += 4;
    }
    y += 15;
    const most = Math.max(...stack.layers.flatMap((layer) => layer.heads.map(numberOf)));
    for (let column = 0; column <= most; column++)
      labels.append(svg("text", { x: at(column) + size / 2, y: y - 4, "text-anchor": "middle" }, String(column)));
    for (let column = numbers.length; column <= most; column++) numbers.push({ x: at(column) + size / 2, text: String(column) });
    for (const layer of stack.layers) {
      const drawn = layer.heads.filter((head) => thumbnail(document, example, head));
      if (!drawn.length) continue;
      labels.append(svg("text", { x: left - 8, y: y + size / 2 + 4, "text-anchor": "end" }, String(layer.layer)));
      for (const head of drawn)
        cells.push({ head, row, column: numberOf(head), x: at(numberOf(head)), y, width: size, height: size, label: title(document, head, words) });
      row++;
      y += size + gap;
    }
    y += 8;
  }
  return { cells, labels, numbers, size, width: Math.ceil(Math.max(at(columns), named)), height: y };
}

/** The maps of these heads, to be painted at their places. */
export function tilesOf(
  { document }: Page,
  example: Example | undefined,
  cells: Cell[],
  { scale = () => 1, opacity = () => 1 }: { scale?: (peak: number) => number; opacity?: (head: number) => number },
): Tile[] {
  return cells.flatMap(({ head, x, y, width, height }) => {
    const found = thumbnail(document, example, head);
    if (!found) return [];
    const { rows, columns, at } = found.weights;
    const by = scale(found.peak);
    return [{ x, y, width, height, rows, columns, value: (row: number, column: number) => by * at(row, column), opacity: opacity(head) }];
  });
}
