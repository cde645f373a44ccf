// All maps at a glance: every head's attention on one example as a small picture, in its layer at its place.
import { chart } from "../draw/chart";
import { exampleChoice } from "../draw/examples";
import { html, svg } from "../draw/element";
import { grid, type Grid } from "../draw/grid";
import { number } from "../draw/number";
import { picture } from "../draw/pixels";
import { thumbnail } from "../maps";
import { filters } from "../measures";
import type { Page } from "../page";
import { card } from "./card";
import { title } from "./heads";
import { placed } from "./places";

const LARGEST = 96;
const GAP = 4;

export function glance(root: HTMLElement, page: Page): () => void {
  const { document, state, words, colours } = page;
  const figure = chart({
    title: words.glance,
    note: words.glanceNote,
    name: `${document.made.model}-maps`,
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
  const scale = html("select", { "aria-label": words.scale, "data-control": "scale", onchange: () => ((common = scale.value === "common"), draw()) });
  for (const [value, text] of Object.entries(words.scales)) scale.append(html("option", { value }, text));
  const picks = exampleChoice(page, [...document.examples.keys()], state.now.example);
  figure.controls.append(picks, scale);
  const side = card(page);
  root.append(html("div", { class: "split" }, figure.figure, side.element));
  let cells: Grid | undefined;

  function draw(): void {
    cells?.close();
    const example = document.examples[state.now.example];
    const { cells: places, labels, size, width, height } = placed(page, example, { width: figure.body.clientWidth || 720, left: 34, smallest: 22, largest: LARGEST, gap: GAP });
    cells = grid({
      page,
      label: words.glance,
      cells: places,
      content: (cell) => {
        const { weights, peak } = thumbnail(document, example, cell.head)!;
        const map = picture(weights.rows, weights.columns, (row, column) => weights.at(row, column) * (common ? peak : 1), colours);
        return [svg("image", { href: map, width: size, height: size, preserveAspectRatio: "none" })];
      },
      tip: (head) => [
        html("strong", {}, title(document, head, words)),
        html("div", { class: "pair" }, html("span", {}, words.largestWeight), html("b", {}, number(thumbnail(document, example, head)?.peak))),
        html("div", { class: "faint" }, words.enterOpens),
      ],
    });
    figure.body.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "glance" }, labels, cells.element));
    fade();
  }

  function fade(): void {
    const chosen = filters(document, words).find((one) => one.key === state.now.filter);
    document.heads.name.forEach((_, head) => cells?.cell(head)?.classList.toggle("out", !!chosen && !chosen.heads.has(head)));
  }

  draw();
  const ends = [state.subscribe(draw, "example"), state.subscribe(fade, "filter")];
  return () => {
    cells?.close();
    side.close();
    for (const end of ends) end();
  };
}
