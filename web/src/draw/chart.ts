// A chart on the page: its title, a sentence about it, the drawing, and the buttons that save it.
import type { Words } from "../words";
import { html, unique } from "./element";
import { csv, download, png, standalone, type Cell } from "./save";

export interface Chart {
  /** the whole figure */
  figure: HTMLElement;
  /** where the drawing goes */
  body: HTMLElement;
  /** right of the title: the chart's own controls */
  controls: HTMLElement;
}

export interface ChartOptions {
  title: string;
  /** a sentence that says how to read it */
  note?: string;
  /** stem of the saved files' names */
  name: string;
  words: Words;
  /** the chart's numbers, names first, asked for when they are saved */
  rows: () => Cell[][];
}

/** A figure with title, note and export to SVG, PNG and CSV. Put one <svg> into its body. */
export function chart(options: ChartOptions): Chart {
  const { title, note, name, words, rows } = options;
  const heading = unique("title");
  const body = html("div", { class: "drawing" });
  const controls = html("div", { class: "controls" });
  const drawing = () => body.querySelector("svg")!;
  const stem = name.replace(/[^\w.-]+/g, "-");
  const button = (label: string, what: string, save: () => void | Promise<void>) =>
    html("button", { type: "button", class: "save", "aria-label": `${what}: ${title}`, title: what, onclick: () => void save() }, label);
  const saves = html(
    "div",
    { class: "saves", role: "group", "aria-label": words.save },
    button("SVG", words.saveSvg, () => download(`${stem}.svg`, standalone(drawing()), "image/svg+xml")),
    button("PNG", words.savePng, async () => download(`${stem}.png`, await png(drawing()))),
    button("CSV", words.saveCsv, () => download(`${stem}.csv`, csv(rows()), "text/csv")),
  );
  const figure = html(
    "figure",
    { class: "chart", "aria-labelledby": heading },
    html("figcaption", {}, html("h3", { id: heading }, title), controls, saves),
    note ? html("p", { class: "note" }, note) : null,
    body,
  );
  return { figure, body, controls };
}
