// Layer after layer: what changes with depth. A dot is a head, the line is the mean of its layer.
import { max, mean } from "d3-array";
import { scaleLinear } from "d3-scale";
import { line } from "d3-shape";
import type { Numbers } from "../../document";
import { bottom, left } from "../../draw/axis";
import { chart } from "../../draw/chart";
import { svg } from "../../draw/element";
import { number } from "../../draw/number";
import type { Cell } from "../../draw/save";
import { known } from "../../measures";
import type { Page } from "../../page";

const WIDTH = 384;
const HEIGHT = 210;
const MARGIN = { left: 44, right: 14, top: 44, bottom: 44 };

interface Panel {
  key: string;
  title: string;
  /** of each head; null where only the layer has a number */
  heads: Numbers | null;
  /** of each layer of each stack */
  layers: (number | null)[][];
}

export function depth(page: Page): { figure: HTMLElement; close: () => void } | null {
  const { document, state, colours } = page;
  const words = page.words.all;
  const { stacks, heads } = document;
  const panels: Panel[] = [];
  for (const key of ["entropy", "distance"]) {
    const found = heads.metrics[key];
    if (!found || !known(found.mean).length) continue;
    const layers = stacks.map((stack) => stack.layers.map((layer) => mean(layer.heads, (head) => found.mean[head] ?? undefined) ?? null));
    panels.push({ key, title: words.depth.titles[key]!, heads: found.mean, layers });
  }
  const diversity = document.redundancy?.layers ?? [];
  if (diversity.length) {
    const bySite = new Map(diversity.map((layer) => [layer.site, layer.diversity]));
    panels.push({ key: "diversity", title: words.depth.titles["diversity"]!, heads: null, layers: stacks.map((stack) => stack.layers.map((layer) => bySite.get(layer.site) ?? null)) });
  }
  if (!panels.length || stacks.every((stack) => stack.layers.length < 2)) return null;

  const one = chart({ title: words.depth.title, note: words.depth.note, name: "layers", words: page.words, rows: () => rows(panels) });
  const many = stacks.length > 1;
  const width = panels.length * WIDTH;
  const height = HEIGHT + (many ? 24 : 0);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, class: "depth", role: "img", "aria-label": words.depth.title });
  const deepest = Math.max(...stacks.map((stack) => stack.layers.length)) - 1;
  for (const [i, panel] of panels.entries()) {
    const values = [...known(panel.heads ?? []), ...panel.layers.flat().filter((value) => value !== null)];
    const x = scaleLinear([0, Math.max(1, deepest)], [MARGIN.left + 10, WIDTH - MARGIN.right - 10]);
    const y = scaleLinear([0, max(values) || 1], [HEIGHT - MARGIN.bottom, MARGIN.top]).nice(4);
    const whole = x.ticks(Math.min(deepest, 8)).filter(Number.isInteger);
    const group = svg(
      "g",
      { transform: `translate(${i * WIDTH},0)` },
      svg("text", { x: MARGIN.left - 34, y: 16, class: "title" }, panel.title),
      bottom(x, HEIGHT - MARGIN.bottom, { title: words.layer, values: whole, format: String }),
      left(y, MARGIN.left, { count: 4, across: WIDTH - MARGIN.left - MARGIN.right }),
    );
    for (const [s, stack] of stacks.entries()) {
      const colour = many ? colours.kind(s) : "var(--accent)";
      if (panel.heads)
        for (const [place, layer] of stack.layers.entries())
          for (const [h, head] of layer.heads.entries()) {
            const value = panel.heads[head];
            if (value === null || value === undefined) continue;
            // heads of a layer stand side by side within its column, so that equal ones do not hide each other
            const aside = ((h + 0.5) / layer.heads.length - 0.5) * Math.min(16, 0.5 * (x(1) - x(0)));
            group.append(svg("circle", { cx: x(place) + aside, cy: y(value), r: 2.6, class: "dot", style: `fill:${colour}`, "data-index": head, "data-value": value, "data-metric": panel.key }));
          }
      const points = panel.layers[s]!.flatMap((value, place): [number, number][] => (value === null ? [] : [[x(place), y(value)]]));
      group.append(svg("path", { d: line()(points) ?? "", class: "line", style: `stroke:${colour}` }));
      for (const [place, value] of panel.layers[s]!.entries())
        if (value !== null)
          group.append(
            svg("circle", { cx: x(place), cy: y(value), r: 4, class: "mean", style: `stroke:${colour}`, "data-metric": panel.key, "data-layer": stack.layers[place]!.layer, "data-site": stack.layers[place]!.site, "data-value": value }),
          );
    }
    drawing.append(group);
  }
  if (many) {
    let x = MARGIN.left;
    for (const [s, stack] of stacks.entries()) {
      drawing.append(svg("rect", { x, y: HEIGHT + 6, width: 12, height: 12, rx: 3, fill: colours.kind(s) }), svg("text", { x: x + 18, y: HEIGHT + 16 }, stack.name));
      x += 40 + 7 * stack.name.length;
    }
  }
  one.body.append(drawing);

  drawing.addEventListener("pointerover", (event) => {
    const dot = (event.target as Element).closest<SVGElement>("[data-value]");
    if (!dot) return page.tip.hide();
    const head = dot.dataset["index"];
    state.set({ hovered: head === undefined ? null : Number(head) });
    const title = panels.find((panel) => panel.key === dot.dataset["metric"])?.title ?? "";
    const who = head === undefined ? words.depth.layer(dot.dataset["layer"] ?? "") : words.depth.head(heads.name[Number(head)] ?? "");
    page.tip.show(event, `${who}: ${title} ${number(Number(dot.dataset["value"]))}`);
  });
  drawing.addEventListener("pointerleave", () => {
    state.set({ hovered: null });
    page.tip.hide();
  });
  drawing.addEventListener("click", (event) => {
    const head = (event.target as Element).closest<SVGElement>("[data-index]")?.dataset["index"];
    if (head !== undefined) state.set({ selected: [Number(head)] });
  });
  const mark = () => {
    const { selected, hovered } = state.now;
    for (const dot of drawing.querySelectorAll<SVGElement>("[data-index]")) {
      const head = Number(dot.dataset["index"]);
      dot.classList.toggle("chosen", selected.includes(head) || hovered === head);
    }
  };
  mark();
  return { figure: one.figure, close: state.subscribe(mark, "selected", "hovered") };

  function rows(all: Panel[]): Cell[][] {
    const table: Cell[][] = [["stack", "layer", "head", ...all.map((panel) => panel.key)]];
    for (const [s, stack] of stacks.entries())
      for (const [place, layer] of stack.layers.entries()) {
        table.push([stack.name, layer.layer, null, ...all.map((panel) => panel.layers[s]![place])]);
        for (const head of layer.heads) table.push([stack.name, layer.layer, heads.head[head], ...all.map((panel) => panel.heads?.[head] ?? null)]);
      }
    return table;
  }
}
