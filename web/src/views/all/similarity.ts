// Every pair of heads at once, in the order of their clusters: blocks along the diagonal are heads that do the same.
import { unpack } from "../../document";
import { chart } from "../../draw/chart";
import { svg } from "../../draw/element";
import { pick } from "../../draw/grid";
import { number } from "../../draw/number";
import { picture } from "../../draw/pixels";
import { measure } from "../../measures";
import type { Page } from "../../page";
import { layerLegend, layersOf } from "./layers";
import { likeBesideLike } from "./order";

const SIDE = 480;
const STRIP = 14;
const TOP = 30;

/** null without distances, or with too many heads for a document. */
export function similarity(page: Page): { figure: HTMLElement; close: () => void } | null {
  const { document, state, colours } = page;
  const words = page.words.all;
  const packed = document.redundancy?.matrix;
  if (!packed) return null;
  const n = packed.shape[0]!;
  const values = unpack(packed);
  const scale = packed.dtype === "uint16" ? 1 / 65535 : 1;
  const distance = (a: number, b: number) => values[a * n + b]! * scale;
  const { name } = document.heads;
  const clusters = measure(document, "cluster", page.words);
  const layers = layersOf(document, colours);
  const order = likeBesideLike(n, distance, clusters.mean);
  let most = 0;
  for (let i = 0; i < values.length; i++) most = Math.max(most, values[i]! * scale);

  const one = chart({
    title: words.similarity.title,
    note: words.similarity.note,
    name: "distance-between-heads",
    words: page.words,
    rows: () => [["head", ...order.map((head) => name[head])], ...order.map((row) => [name[row], ...order.map((column) => Number(distance(row, column).toFixed(4)))])],
  });
  const width = STRIP + 4 + SIDE + 8;
  const height = TOP + SIDE + 46;
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, class: "similarity", role: "img", "aria-label": words.similarity.title });
  const each = SIDE / n;
  const left = STRIP + 4;
  const url = picture(n, n, (row, column) => 1 - distance(order[row]!, order[column]!) / (most || 1), colours);
  drawing.append(svg("image", { x: left, y: TOP, width: SIDE, height: SIDE, href: url, preserveAspectRatio: "none", class: "pixels" }));
  for (const [i, head] of order.entries())
    drawing.append(
      svg("rect", { x: 0, y: TOP + i * each, width: STRIP - 3, height: each + 0.2, fill: layers.colour(layers.place[head]!) }),
      svg("rect", { x: left + i * each, y: TOP - STRIP, width: each + 0.2, height: STRIP - 3, fill: layers.colour(layers.place[head]!) }),
    );
  for (const [i, kind] of (clusters.kinds ?? []).entries()) {
    const places = order.flatMap((head, place) => (clusters.mean[head] === i ? [place] : []));
    const start = Math.min(...places);
    const size = places.length * each;
    const colour = colours.kind(Math.min(i, 7));
    drawing.append(svg("rect", { x: left + start * each, y: TOP + start * each, width: size, height: size, class: "block", stroke: colour }));
    if (size > 56) drawing.append(svg("text", { x: left + start * each + size / 2, y: TOP - STRIP - 4, "text-anchor": "middle", class: "tiny" }, kind));
  }
  const cross = svg("path", { class: "cross", "data-screen-only": "" });
  drawing.append(cross);

  const y = TOP + SIDE + 14;
  const ramp = svg("g", { transform: `translate(${left},${y})`, class: "legend" });
  const steps = 48;
  for (let i = 0; i < steps; i++) ramp.append(svg("rect", { x: i * 4, y: 0, width: 4.3, height: 10, fill: colours.ramp(1 - i / (steps - 1)) }));
  ramp.append(
    svg("text", { x: 0, y: 24, class: "tiny" }, `0 · ${words.similarity.same}`),
    svg("text", { x: steps * 4, y: 24, class: "tiny", "text-anchor": "end" }, `${number(most, 2)} · ${words.similarity.different}`),
  );
  drawing.append(ramp, layerLegend(layers, words.layer, left + 232, y));
  one.body.append(drawing);

  const placeOf = (event: PointerEvent | MouseEvent): [number, number] | null => {
    const box = drawing.getBoundingClientRect();
    const zoom = width / box.width;
    const column = Math.floor(((event.clientX - box.left) * zoom - left) / each);
    const row = Math.floor(((event.clientY - box.top) * zoom - TOP) / each);
    return row >= 0 && column >= 0 && row < n && column < n ? [row, column] : null;
  };
  drawing.addEventListener("pointermove", (event) => {
    const place = placeOf(event);
    if (!place) {
      cross.setAttribute("d", "");
      return page.tip.hide();
    }
    const [row, column] = place;
    const [a, b] = [order[row]!, order[column]!];
    const [px, py] = [left + column * each, TOP + row * each];
    cross.setAttribute("d", `M${left},${py}h${SIDE}v${each}h${-SIDE}zM${px},${TOP}v${SIDE}h${each}v${-SIDE}z`);
    state.set({ hovered: a });
    page.tip.show(event, words.similarity.pair(name[a]!, name[b]!, number(distance(a, b))));
  });
  drawing.addEventListener("pointerleave", () => {
    cross.setAttribute("d", "");
    state.set({ hovered: null });
    page.tip.hide();
  });
  drawing.addEventListener("click", (event) => {
    const place = placeOf(event);
    if (!place) return;
    pick(page, order[place[0]]!, false);
    if (place[0] !== place[1]) pick(page, order[place[1]]!, true);
  });
  return { figure: one.figure, close: () => {} };
}
