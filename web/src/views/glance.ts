// All maps at a glance: every head's attention on one example as a small picture, in its layer at its place.
import { chart } from "../draw/chart";
import { exampleChoice } from "../draw/examples";
import { html, svg } from "../draw/element";
import { grid, type Cell, type Grid } from "../draw/grid";
import { number } from "../draw/number";
import { picture } from "../draw/pixels";
import { thumbnail } from "../maps";
import { filters } from "../measures";
import type { Page } from "../page";
import { card } from "./card";
import { title } from "./heads";

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
    const stacks = document.stacks.filter((stack) => stack.layers.some((layer) => example?.maps.some((map) => map.site === layer.site)));
    const numberOf = (head: number) => document.heads.head[head]!;
    const columns = Math.max(1, ...stacks.flatMap((stack) => stack.layers.flatMap((layer) => layer.heads.map((head) => numberOf(head) + 1))));
    const left = 34;
    const size = Math.max(22, Math.min(LARGEST, Math.floor(((figure.body.clientWidth || 720) - left) / columns) - GAP));
    const labels = svg("g", { class: "axis", "aria-hidden": "true" });
    const places: Cell[] = [];
    let y = 0;
    let row = 0;
    for (const stack of stacks) {
      if (document.stacks.length > 1) {
        y += 14;
        labels.append(svg("text", { x: 0, y, class: "stack" }, `${words.kinds[stack.kind] ?? stack.kind} · ${stack.name}`));
        y += 4;
      }
      y += 15;
      const most = Math.max(...stack.layers.flatMap((layer) => layer.heads.map(numberOf)));
      for (let column = 0; column <= most; column++)
        labels.append(svg("text", { x: left + column * (size + GAP) + size / 2, y: y - 4, "text-anchor": "middle" }, String(column)));
      for (const layer of stack.layers) {
        const drawn = layer.heads.filter((head) => thumbnail(document, example, head));
        if (!drawn.length) continue;
        labels.append(svg("text", { x: left - 8, y: y + size / 2 + 4, "text-anchor": "end" }, String(layer.layer)));
        for (const head of drawn)
          places.push({
            head,
            row,
            column: numberOf(head),
            x: left + numberOf(head) * (size + GAP),
            y,
            width: size,
            height: size,
            label: title(document, head, words),
          });
        row++;
        y += size + GAP;
      }
      y += 8;
    }
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
    const width = left + columns * (size + GAP);
    figure.body.replaceChildren(svg("svg", { viewBox: `0 0 ${width} ${y}`, width, height: y, class: "glance" }, labels, cells.element));
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
