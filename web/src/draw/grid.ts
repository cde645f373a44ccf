// Heads as cells that can be pointed at, walked through with the arrow keys, picked and opened. Used by the head map
// and by the view of all maps, which only draw what is inside the cells.
import { doubts, unverified } from "../doubts";
import type { Page } from "../page";
import { svg, type Child } from "./element";

export interface Cell {
  head: number;
  row: number;
  column: number;
  x: number;
  y: number;
  width: number;
  height: number;
  /** what screen readers say */
  label: string;
  attributes?: Record<string, string | number | null>;
}

export interface GridOptions {
  page: Page;
  label: string;
  cells: Cell[];
  /** what is drawn in a cell, around its upper left corner */
  content: (cell: Cell) => Child[];
  /** what the tip shows */
  tip: (head: number) => Child[];
  /** a click, or the space bar; picks the head if nothing is given */
  pick?: (head: number) => void;
  /** whether a plain click adds to what is picked, as one with Ctrl or Shift does */
  adds?: () => boolean;
}

export interface Grid {
  element: SVGGElement;
  cell(head: number): SVGGElement | undefined;
  close(): void;
}

/** Picks a head: alone, or in addition to those picked before. */
export function pick(page: Page, head: number, add: boolean): void {
  const { selected } = page.state.now;
  if (!add) page.state.set({ selected: [head] });
  else page.state.set({ selected: selected.includes(head) ? selected.filter((one) => one !== head) : [...selected, head] });
}

/** What shows the head under the pointer keeps showing it while the keyboard is in there. */
export const FOLLOWS = { "data-follows": "" };

/** The head is no longer pointed at, unless the focus went on to what shows it: that must not change under it. */
export function unfocus(page: Page, event: FocusEvent): void {
  if (!(event.relatedTarget as Element | null)?.closest("[data-follows]")) page.state.set({ hovered: null });
}

/** What screen readers say of a head. */
export function spoken(page: Page, head: number, label: string): string {
  return unverified(page.document, head) ? `${label}, ${page.words.notVerified}` : label;
}

/** The upper right corner of a cell, which marks a head that is not verified. */
function corner({ width, height }: Cell): string {
  const size = Math.max(6, Math.min(14, 0.45 * Math.min(width, height)));
  return `M${width - size} 0H${width}V${size}Z`;
}

export function grid(options: GridOptions): Grid {
  const { page, cells } = options;
  const { state, tip } = page;
  const element = svg("g", { role: "grid", "aria-label": options.label, "aria-multiselectable": "true" });
  const drawn = new Map<number, SVGGElement>();
  const byPlace = new Map<string, Cell>();
  const rows = new Map<number, SVGGElement>();
  for (const cell of cells) {
    let row = rows.get(cell.row);
    if (!row) {
      row = svg("g", { role: "row" });
      rows.set(cell.row, row);
      element.append(row);
    }
    const one = svg(
      "g",
      {
        role: "gridcell",
        class: "cell",
        transform: `translate(${cell.x},${cell.y})`,
        tabindex: "-1",
        "aria-label": spoken(page, cell.head, cell.label),
        "aria-selected": "false",
        "data-head": page.document.heads.name[cell.head],
        "data-index": cell.head,
        ...cell.attributes,
      },
      ...options.content(cell),
      svg("rect", { class: "edge", x: 0.5, y: 0.5, width: cell.width - 1, height: cell.height - 1, rx: 3 }),
      unverified(page.document, cell.head) ? svg("path", { class: "doubtful", d: corner(cell) }) : null,
    );
    row.append(one);
    drawn.set(cell.head, one);
    byPlace.set(`${cell.row},${cell.column}`, cell);
  }
  const places = new Map(cells.map((cell) => [cell.head, cell]));
  const widest = Math.max(0, ...cells.map((cell) => cell.column));
  const lowest = Math.max(0, ...cells.map((cell) => cell.row));

  const headAt = (event: Event): number | null => {
    const found = (event.target as Element).closest<SVGGElement>("[data-index]");
    return found ? Number(found.dataset["index"]) : null;
  };

  /** The next cell in a direction, over gaps of uneven layers. */
  function step(from: Cell, down: number, right: number): Cell | undefined {
    let { row, column } = from;
    for (;;) {
      row += down;
      column += right;
      if (row < 0 || column < 0 || row > lowest || column > widest) return undefined;
      const found = byPlace.get(`${row},${column}`);
      if (found) return found;
    }
  }

  let home: SVGGElement | undefined;
  function setHome(cell: SVGGElement | undefined): void {
    home?.setAttribute("tabindex", "-1");
    cell?.setAttribute("tabindex", "0");
    home = cell;
  }

  function mark(): void {
    for (const [head, cell] of drawn) cell.setAttribute("aria-selected", String(state.now.selected.includes(head)));
  }

  element.addEventListener("pointerover", (event) => {
    const head = headAt(event);
    if (head === null) return;
    state.set({ hovered: head });
    tip.show(event, ...options.tip(head), ...doubts(page, head));
  });
  element.addEventListener("pointerleave", () => {
    state.set({ hovered: null });
    tip.hide();
  });
  element.addEventListener("focusin", (event) => {
    const head = headAt(event);
    if (head === null) return;
    setHome(drawn.get(head));
    state.set({ hovered: head });
    if (drawn.get(head)!.matches(":focus-visible")) tip.show(drawn.get(head)!, ...options.tip(head), ...doubts(page, head));
  });
  element.addEventListener("focusout", (event) => {
    unfocus(page, event);
    tip.hide();
  });
  element.addEventListener("click", (event) => {
    const head = headAt(event);
    if (head === null) return;
    drawn.get(head)!.focus({ preventScroll: true });
    if (options.pick) options.pick(head);
    else pick(page, head, event.ctrlKey || event.metaKey || event.shiftKey || !!options.adds?.());
  });
  element.addEventListener("dblclick", (event) => {
    const head = headAt(event);
    if (head !== null && !options.pick) page.open("head", head);
  });
  element.addEventListener("keydown", (event) => {
    const head = headAt(event);
    if (head === null) return;
    const from = places.get(head)!;
    const inRow = cells.filter((cell) => cell.row === from.row);
    let to: Cell | undefined;
    if (event.key === "ArrowDown") to = step(from, 1, 0);
    else if (event.key === "ArrowUp") to = step(from, -1, 0);
    else if (event.key === "ArrowRight") to = step(from, 0, 1);
    else if (event.key === "ArrowLeft") to = step(from, 0, -1);
    else if (event.key === "Home") to = event.ctrlKey ? cells[0] : inRow[0];
    else if (event.key === "End") to = event.ctrlKey ? cells.at(-1) : inRow.at(-1);
    else if (event.key === "Enter") page.open("head", head);
    else if (event.key === " ") options.pick ? options.pick(head) : pick(page, head, event.ctrlKey || event.shiftKey || !!options.adds?.());
    else if (event.key === "Escape") tip.hide();
    else return;
    event.preventDefault();
    if (to) drawn.get(to.head)!.focus();
  });

  setHome(drawn.get(state.now.selected.at(-1) ?? -1) ?? drawn.get(cells[0]?.head ?? -1));
  mark();
  const end = state.subscribe(mark, "selected");
  return { element, cell: (head) => drawn.get(head), close: end };
}
