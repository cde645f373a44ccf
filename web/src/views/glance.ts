// All maps at a glance: every head's attention on one example as a small picture, in its layer at its place.
import { chart } from "../draw/chart";
import { exampleChoice } from "../draw/examples";
import { html, svg } from "../draw/element";
import { grid, type Cell, type Grid } from "../draw/grid";
import { number } from "../draw/number";
import { sheet, type Sheet } from "../draw/pixels";
import { thumbnail } from "../maps";
import { filters } from "../measures";
import type { Page } from "../page";
import { card } from "./card";
import { title } from "./heads";
import { placed, tilesOf } from "./places";

const LARGEST = 96;
const GAP = 4;

export function glance(root: HTMLElement, page: Page): () => void {
  const { document, state, words, colours } = page;
  const figure = chart({
    title: words.glance,
    note: words.glanceNote,
    name: `${document.header.model}-maps`,
    words,
    rows: () => [
      ["head", "site", "row", "column", "weight"],
      ...document.heads.name.flatMap((name, head) => {
        const map = thumbnail(document, document.examples[state.now.example], head);
        if (!map) return [];
        const { rows, columns, at } = map.weights;
        return Array.from({ length: rows * columns }, (_, i) => {
          const [row, column] = [Math.floor(i / columns), i % columns];
          return [name, document.heads.site[head]!, row, column, Number((at(row, column) * map.peak).toPrecision(4))];
        });
      }),
    ],
  });
  let common = false;
  const scale = html("select", { "aria-label": words.scale, "data-control": "scale", onchange: () => ((common = scale.value === "common"), paint()) });
  for (const [value, text] of Object.entries(words.scales)) scale.append(html("option", { value }, text));
  const picks = exampleChoice(page, [...document.examples.keys()], state.now.example);
  figure.controls.append(picks, scale);
  const side = card(page);
  root.append(html("div", { class: "split" }, figure.figure, side.element));
  let cells: Grid | undefined;
  let paper: Sheet | undefined;
  let shown: Cell[] = [];

  function draw(): void {
    cells?.close();
    const example = document.examples[state.now.example];
    const { cells: places, labels, size, width, height } = placed(page, example, { width: figure.body.clientWidth || 720, left: 34, smallest: 22, largest: LARGEST, gap: GAP });
    cells = grid({
      page,
      label: words.glance,
      cells: places,
      content: () => [svg("rect", { class: "glass", width: size, height: size })],
      tip: (head) => [
        html("strong", {}, title(document, head, words)),
        html("div", { class: "pair" }, html("span", {}, words.strongest), html("b", {}, number(thumbnail(document, example, head)?.peak))),
        html("div", { class: "faint" }, words.enterOpens),
      ],
    });
    shown = places;
    paper = sheet(svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "glance" }, labels, cells.element), colours);
    figure.body.replaceChildren(paper.element);
    paint();
  }

  function paint(): void {
    const chosen = filters(document, words).find((one) => one.key === state.now.filter);
    const out = (head: number) => !!chosen && !chosen.heads.has(head);
    paper?.paint(tilesOf(page, document.examples[state.now.example], shown, { scale: (peak) => (common ? peak : 1), opacity: (head) => (out(head) ? 0.13 : 1) }));
    for (const { head } of shown) cells?.cell(head)?.classList.toggle("out", out(head));
  }

  draw();
  const ends = [state.subscribe(draw, "example"), state.subscribe(paint, "filter")];
  return () => {
    cells?.close();
    side.close();
    for (const end of ends) end();
  };
}
