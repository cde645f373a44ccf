// Heads as points of a map: those that attend alike lie together.
import { scaleLinear } from "d3-scale";
import { chart } from "../../draw/chart";
import { ink } from "../../draw/colour";
import { svg } from "../../draw/element";
import { pick } from "../../draw/grid";
import { number } from "../../draw/number";
import { known, measure } from "../../measures";
import type { Page } from "../../page";
import { layerLegend, layersOf } from "./layers";

const WIDTH = 620;
const HEIGHT = 560;

/** null without distances. */
export function space(page: Page): { figure: HTMLElement; close: () => void } | null {
  const { document, state, colours } = page;
  const words = page.words.all;
  const found = document.redundancy;
  if (!found) return null;
  const { name } = document.heads;
  const layers = layersOf(document, colours);
  const clusters = measure(document, "cluster", page.words);
  const placed = [...name.keys()].filter((head) => found.x[head] !== null && found.y[head] !== null);
  const one = chart({
    title: words.space.title,
    note: words.space.note,
    name: "heads-by-distance",
    words: page.words,
    rows: () => [
      ["head", "layer", "x", "y", "cluster", "twin", "twin_distance"],
      ...placed.map((head) => [
        name[head], document.heads.layer[head], found.x[head], found.y[head], clusterName(head), name[found.twin[head]!] ?? null, found.twin_distance[head],
      ]), // prettier-ignore
    ],
  });
  const clusterName = (head: number) => {
    const at = clusters.mean[head];
    return at === null || at === undefined ? null : (clusters.kinds![at] ?? null);
  };

  const [x, y] = scales(known(found.x), known(found.y));
  const at = (head: number): [number, number] => [x(found.x[head]!), y(found.y[head]!)];
  const dense = placed.length > 160;
  const radius = dense ? 5 : placed.length > 100 ? 9 : 11;
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, class: "space", role: "group", "aria-label": words.space.title });

  const labels: SVGTextElement[] = [];
  for (const [i, kind] of (clusters.kinds ?? []).entries()) {
    const members = placed.filter((head) => clusters.mean[head] === i).map(at);
    const colour = colours.kind(Math.min(i, 7));
    const outline = hull(members).map(([px, py]) => `${px.toFixed(1)},${py.toFixed(1)}`);
    drawing.append(svg("path", { d: `M${outline.join("L")}Z`, class: "blob", fill: colour, stroke: colour, "stroke-width": 2 * radius + 10 }));
    const top = members.reduce((a, b) => (b[1] < a[1] ? b : a));
    if (clusters.kinds!.length <= 12)
      drawing.append(svg("text", { x: top[0], y: Math.max(12, top[1] - radius - 10), "text-anchor": "middle", class: "cluster" }, kind));
  }
  const farthest = Math.max(1e-9, ...known(found.twin_distance));
  for (const head of placed) {
    const twin = found.twin[head]!;
    if (twin < 0 || found.x[twin] === null || (found.twin[twin] === head && twin < head)) continue;
    const near = 1 - (found.twin_distance[head] ?? farthest) / farthest;
    const [[x1, y1], [x2, y2]] = [at(head), at(twin)];
    drawing.append(svg("line", { x1, y1, x2, y2, class: "twins", "stroke-width": (0.8 + 2.6 * near).toFixed(2), "stroke-opacity": (0.25 + 0.6 * near).toFixed(2) }));
  }

  const points = new Map<number, SVGGElement>();
  for (const head of placed) {
    const [px, py] = at(head);
    const twin = found.twin[head]!;
    const label = words.space.label(name[head]!, clusterName(head) ?? "", name[twin] ?? "", number(found.twin_distance[head]));
    const fill = layers.colour(layers.place[head]!);
    const point = svg(
      "g",
      { class: "point", transform: `translate(${px.toFixed(1)},${py.toFixed(1)})`, role: "button", tabindex: "-1", "aria-label": label, "aria-pressed": "false", "data-head": name[head], "data-index": head, "data-value": found.twin_distance[head] },
      svg("circle", { r: radius, fill }),
      dense ? null : svg("text", { "text-anchor": "middle", "dominant-baseline": "central", class: `name ${ink(fill) === "#ffffff" ? "bright" : "deep"}` }, name[head]!.length > 5 ? "" : name[head]),
    ); // prettier-ignore
    points.set(head, point);
    drawing.append(point);
  }
  drawing.append(...labels, layerLegend(layers, words.layer, 6, HEIGHT - 30));
  one.body.append(drawing);

  const headOf = (event: Event) => {
    const point = (event.target as Element).closest<SVGGElement>("[data-index]");
    return point ? Number(point.dataset["index"]) : null;
  };
  const tell = (where: PointerEvent | Element, head: number) =>
    page.tip.show(where, ...[words.space.label(name[head]!, clusterName(head) ?? "", name[found.twin[head]!] ?? "", number(found.twin_distance[head]))]);
  drawing.addEventListener("pointerover", (event) => {
    const head = headOf(event);
    state.set({ hovered: head });
    if (head === null) page.tip.hide();
    else tell(event, head);
  });
  drawing.addEventListener("pointerleave", () => {
    state.set({ hovered: null });
    page.tip.hide();
  });
  drawing.addEventListener("click", (event) => {
    const head = headOf(event);
    if (head !== null) pick(page, head, event.ctrlKey || event.metaKey || event.shiftKey);
  });
  drawing.addEventListener("dblclick", (event) => {
    const head = headOf(event);
    if (head !== null) page.open("head", head);
  });
  drawing.addEventListener("focusin", (event) => {
    const head = headOf(event);
    if (head === null) return;
    home(head);
    if (points.get(head)!.matches(":focus-visible")) tell(points.get(head)!, head);
  });
  drawing.addEventListener("focusout", () => page.tip.hide());
  drawing.addEventListener("keydown", (event) => {
    const head = headOf(event);
    if (head === null) return;
    const way = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (way) {
      const next = towards(head, way[0]!, way[1]!);
      if (next !== null) points.get(next)!.focus();
    } else if (event.key === "Enter") page.open("head", head);
    else if (event.key === " ") pick(page, head, event.ctrlKey || event.shiftKey);
    else return;
    event.preventDefault();
  });

  /** The nearest point in a direction: what lies aside counts double. */
  function towards(head: number, dx: number, dy: number): number | null {
    const [hx, hy] = at(head);
    let best: number | null = null;
    let least = Infinity;
    for (const other of placed) {
      const [ox, oy] = at(other);
      const along = (ox - hx) * dx + (oy - hy) * dy;
      const aside = Math.abs((ox - hx) * dy) + Math.abs((oy - hy) * dx);
      if (other !== head && along > 0 && along + 2 * aside < least) [best, least] = [other, along + 2 * aside];
    }
    return best;
  }

  function home(head: number): void {
    for (const [other, point] of points) point.setAttribute("tabindex", other === head ? "0" : "-1");
  }

  function mark(): void {
    for (const [head, point] of points) {
      const chosen = state.now.selected.includes(head);
      point.setAttribute("aria-pressed", String(chosen));
      point.classList.toggle("hovered", state.now.hovered === head);
    }
  }
  home(state.now.selected.at(-1) ?? placed[0] ?? 0);
  mark();
  return { figure: one.figure, close: state.subscribe(mark, "selected", "hovered") };
}

/** One unit is as long across as it is down: distances are what the map is about. */
function scales(xs: number[], ys: number[]): [(value: number) => number, (value: number) => number] {
  const [left, right, low, high] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const margin = 34;
  const [width, height] = [WIDTH - 2 * margin, HEIGHT - 2 * margin - 34];
  const scale = Math.min(width / (right - left || 1), height / (high - low || 1));
  const half = [(right + left) / 2, (high + low) / 2];
  return [
    scaleLinear([half[0]! - width / 2 / scale, half[0]! + width / 2 / scale], [margin, WIDTH - margin]),
    scaleLinear([half[1]! - height / 2 / scale, half[1]! + height / 2 / scale], [margin + height, margin]),
  ];
}

/** The corners around points, in order (Andrew's monotone chain). */
export function hull(points: [number, number][]): [number, number][] {
  const sorted = [...points].sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  if (sorted.length < 3) return sorted;
  const half = (list: [number, number][]) => {
    const chain: [number, number][] = [];
    for (const point of list) {
      while (chain.length > 1 && turn(chain.at(-2)!, chain.at(-1)!, point) <= 0) chain.pop();
      chain.push(point);
    }
    return chain.slice(0, -1);
  };
  return [...half(sorted), ...half(sorted.reverse())];
}

function turn(a: [number, number], b: [number, number], c: [number, number]): number {
  return (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0]);
}
