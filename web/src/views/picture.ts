// Pictures: where a patch looks, in one head and in every head.
import { scaleLinear } from "d3-scale";
import { chart } from "../draw/chart";
import { html, svg } from "../draw/element";
import { number, percent } from "../draw/number";
import { radios, type Radios } from "../draw/radios";
import { unpack, type Example } from "../document";
import { attention, thumbnail, type Weights } from "../maps";
import { rollout, rowMean } from "../rollout";
import type { Page } from "../page";
import { current } from "../state";
import { among, headAmong, layersOf } from "./among";
import { title } from "./heads";
import { tiles } from "./tiles";

const SIDE = 448; // of the large picture's longer edge

export function picture(root: HTMLElement, page: Page): () => void {
  const { document, state } = page;
  const words = page.words.picture;
  const { example, choices, close: again } = among(page, (one) => !!one.picture);
  const { png, rows, columns, first } = example.picture!;
  const patches = rows * columns;
  const keys = first + patches;
  // heads that look from every patch at every patch; on the live page, what they see is asked for patch by patch
  const exact = new Map<number, Weights>();
  const shown = new Set<number>();
  for (const head of document.heads.name.keys()) {
    const found = attention(document, example, head);
    if (!found || found.queries.length !== keys || found.keys.length !== keys) continue;
    if (found.exact) exact.set(head, found.exact);
    if (found.exact || page.live) shown.add(head);
  }
  root.append(choices);
  if (!shown.size) {
    root.append(html("p", { class: "note" }, words.nothing));
    return again;
  }
  const layers = layersOf(document, (one) => shown.has(one));
  let head = headAmong(page, (one) => shown.has(one), () => liveliest(page, example, shown));
  let query = first + Math.floor(rows / 2) * columns + Math.floor(columns / 2);
  const weight = (one: number, key: number): number => {
    const row = example.rows?.[query]?.[document.heads.site[one]!];
    return exact.get(one)?.at(query, key) ?? (row ? unpack(row)[document.heads.head[one]! * keys + key]! / 65535 : 0);
  };

  const [width, height] = columns >= rows ? [SIDE, (SIDE * rows) / columns] : [(SIDE * columns) / rows, SIDE];
  const [wide, high] = [width / columns, height / rows];
  const large = chart({
    title: words.one,
    note: words.oneNote,
    name: "attention-of-a-patch",
    words: page.words,
    rows: () => [["head", "query", "row", "column", "weight"], ...table(head)],
  });
  const every = chart({
    title: words.every,
    note: words.everyNote,
    name: "attention-of-a-patch-in-every-head",
    words: page.words,
    rows: () => [["head", "query", "row", "column", "weight"], ...[...shown].flatMap(table)],
  });
  large.figure.classList.add("large-picture");
  const whole = chart({
    title: words.received,
    name: "attention-that-each-patch-receives",
    words: page.words,
    rows: () => [["mode", "row", "column", "share"], ...shares.slice(first).map((share, patch) => [rolled ? "rollout" : document.heads.name[head]!, Math.floor(patch / columns), patch % columns, Number(share.toPrecision(5))])],
  });
  root.append(html("div", { class: "pictures" }, large.figure, every.figure, exact.size === shown.size ? whole.figure : null));
  const said = html("p", { class: "reading", "aria-live": "polite" });
  large.figure.append(said);

  let rolled = false;
  let shares: number[] = [];
  const wholeNote = html("p", { class: "note" });
  whole.body.before(wholeNote);
  const ways = radios(words.received, [words.inHead, words.rollout], () => Number(rolled), (i) => {
    rolled = i === 1;
    drawWhole();
  });
  whole.controls.append(ways.element);

  /** What each patch receives: in this head from all queries, or by rollout from the chosen query. */
  function drawWhole(): void {
    if (exact.size !== shown.size) return;
    const found = rolled ? rollout(document, example, head) : exact.get(head)!;
    const none = typeof found === "string";
    shares = none ? [] : rowMean(found, rolled ? query : -1);
    wholeNote.textContent = none
      ? page.words.noRollout(page.words.rolloutMissing[found])
      : rolled
        ? `${words.rolloutFrom(name(query))} ${page.words.rolloutNote}`
        : words.receivedNote(document.heads.name[head]!, percent(shares.slice(0, first).reduce((sum, share) => sum + share, 0)));
    const most = Math.max(1e-9, ...shares.slice(first));
    const scale = 0.6;
    const drawn = svg("svg", { viewBox: `0 0 ${scale * width + 2} ${scale * height + 24}`, width: scale * width + 2, height: scale * height + 24, role: "img", "aria-label": `${words.received}. ${words.peak(percent(none ? 0 : most))}` });
    if (!none)
      drawn.append(
        svg("image", { x: 1, y: 1, width: scale * width, height: scale * height, href: png, preserveAspectRatio: "none", class: "pixels" }),
        svg("image", { x: 1, y: 1, width: scale * width, height: scale * height, href: glow(rows, columns, (patch) => shares[first + patch]! / most), preserveAspectRatio: "none", class: "pixels", "data-received": rolled ? "rollout" : "head" }),
        svg("text", { x: scale * width + 1, y: scale * height + 18, "text-anchor": "end", class: "tiny" }, words.peak(percent(most))),
      );
    whole.body.replaceChildren(drawn);
  }

  // tokens that are no patches: the class token, registers
  let extras: Radios | null = null;
  if (first > 0) {
    const names = Array.from({ length: first }, (_, i) => (i === 0 ? words.classToken : words.register(i)));
    extras = radios(words.query, [...names, words.patch], () => Math.min(query, first), (i) => look(i < first ? i : first));
    large.controls.append(extras.element);
  }

  const drawing = svg("svg", { viewBox: `0 0 ${width + 106} ${height + 30}`, width: width + 106, class: "patches", role: "group", "aria-label": words.one });
  const veil = svg("image", { x: 1, y: 1, width, height, preserveAspectRatio: "none", class: "pixels" });
  const chosen = svg("rect", { class: "query", width: wide, height: high });
  const peakText = svg("text", { x: width + 1, y: height + 24, "text-anchor": "end", class: "tiny" });
  const legend = svg("g", { transform: `translate(1,${height + 10})` });
  for (let i = 0; i < 40; i++) legend.append(svg("rect", { x: i * 3, y: 0, width: 3.3, height: 9, fill: heat(i / 39) }));
  legend.append(svg("text", { x: 128, y: 8, class: "tiny" }, words.scale));
  drawing.append(svg("image", { x: 1, y: 1, width, height, href: png, preserveAspectRatio: "none", class: "pixels" }), veil);
  // the picture as it is, beside the one that glows
  const plain = { width: (90 * width) / SIDE, height: (90 * height) / SIDE };
  drawing.append(svg("image", { x: width + 14, y: 1, ...plain, href: png, preserveAspectRatio: "none", class: "pixels" }));
  const cells = svg("g", { role: "grid", "aria-label": words.patches });
  const buttons: SVGRectElement[] = [];
  for (let row = 0; row < rows; row++) {
    const line = svg("g", { role: "row" });
    for (let column = 0; column < columns; column++) {
      const patch = svg("rect", { x: 1 + column * wide, y: 1 + row * high, width: wide, height: high, class: "patch", role: "gridcell", tabindex: "-1", "data-patch": row * columns + column });
      buttons.push(patch);
      line.append(patch);
    }
    cells.append(line);
  }
  drawing.append(cells, chosen, legend, peakText);
  large.body.append(drawing);

  const widest = Math.max(...layers.flatMap((layer) => layer.heads.map((one) => document.heads.head[one]! + 1)));
  const small = Math.max(44, Math.min(116, 520 / widest - 5));
  const tile = columns >= rows ? { width: small, height: (small * rows) / columns } : { width: (small * columns) / rows, height: small };
  const veils = new Map<number, SVGImageElement>();
  const many = tiles({
    page,
    label: words.every,
    layers,
    ...tile,
    content: (one) => {
      const over = svg("image", { ...tile, preserveAspectRatio: "none", class: "pixels" });
      veils.set(one, over);
      return [svg("image", { ...tile, href: png, preserveAspectRatio: "none", class: "pixels" }), over];
    },
    tip: (one) => [html("b", {}, title(document, one, page.words)), html("br"), words.peak(percent(peak(one)))],
    pick: (one) => state.set({ selected: [one] }),
  });
  every.body.append(many.drawing);

  function table(one: number): (string | number)[][] {
    return Array.from({ length: patches }, (_, patch) => [
      document.heads.name[one]!, name(query), Math.floor(patch / columns), patch % columns, Number(weight(one, first + patch).toPrecision(5)),
    ]); // prettier-ignore
  }

  function name(place: number): string {
    if (place < first) return place === 0 ? words.classToken : words.register(place);
    return words.place(Math.floor((place - first) / columns), (place - first) % columns);
  }

  function peak(one: number): number {
    let most = 0;
    for (let patch = 0; patch < patches; patch++) most = Math.max(most, weight(one, first + patch));
    return most;
  }

  function over(one: number): string {
    const most = peak(one) || 1;
    return glow(rows, columns, (patch) => weight(one, first + patch) / most);
  }

  function draw(): void {
    veil.setAttribute("href", over(head));
    for (const [one, image] of veils) image.setAttribute("href", over(one));
    for (const [patch, button] of buttons.entries()) {
      const share = weight(head, first + patch);
      const asked = first + patch === query;
      button.setAttribute("aria-label", `${name(first + patch)}: ${percent(share)}`);
      button.setAttribute("aria-selected", String(asked));
      button.dataset["value"] = String(share);
      button.tabIndex = asked || (query < first && patch === 0) ? 0 : -1;
    }
    chosen.setAttribute("visibility", query < first ? "hidden" : "visible");
    chosen.setAttribute("x", String(1 + ((query - first) % columns) * wide));
    chosen.setAttribute("y", String(1 + Math.floor((query - first) / columns) * high));
    peakText.textContent = words.peak(percent(peak(head)));
    let self = 0;
    let outside = 0;
    for (let key = 0; key < keys; key++) {
      if (key === query) self = weight(head, key);
      if (key < first) outside += weight(head, key);
    }
    said.textContent = words.reading(document.heads.name[head]!, name(query), percent(self), first > 0 ? percent(outside) : "");
    for (const one of shown) many.grid.cell(one)?.classList.toggle("current", one === head);
    extras?.update();
    drawWhole();
  }

  function look(at: number): void {
    query = at;
    if (!page.live || exact.size === shown.size || example.rows?.[at]) return draw();
    void page.live.rows(example, at).then((came) => came && query === at && draw(), () => {});
  }

  const patchOf = (event: Event) => (event.target as Element).closest<SVGElement>("[data-patch]");
  cells.addEventListener("click", (event) => {
    const patch = patchOf(event);
    if (patch) look(first + Number(patch.dataset["patch"]));
  });
  cells.addEventListener("pointerover", (event) => {
    const patch = patchOf(event);
    if (patch) page.tip.show(event, html("b", {}, number(Number(patch.dataset["value"]), 4)), html("br"), name(first + Number(patch.dataset["patch"])));
  });
  cells.addEventListener("pointerleave", () => page.tip.hide());
  cells.addEventListener("keydown", (event) => {
    const patch = Number(patchOf(event)?.dataset["patch"] ?? 0);
    const [row, column] = [Math.floor(patch / columns), patch % columns];
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!step && event.key !== " " && event.key !== "Enter") return;
    event.preventDefault();
    const [r, c] = [row + (step?.[0] ?? 0), column + (step?.[1] ?? 0)];
    if (r < 0 || c < 0 || r >= rows || c >= columns) return;
    look(first + r * columns + c);
    buttons[r * columns + c]!.focus();
  });
  const end = state.subscribe(() => {
    if (shown.has(current(state.now))) head = current(state.now);
    draw();
  }, "selected");
  look(query);
  return () => {
    end();
    again();
    many.grid.close();
  };
}

/** Dark where there is nothing, bright where attention goes; it covers the picture, more where there is more to say. */
const heat = scaleLinear<string>([0, 0.25, 0.5, 0.75, 1], ["#1a1038", "#6a1f63", "#c43c4e", "#f68d2c", "#fcf0a0"]);

function glow(rows: number, columns: number, share: (patch: number) => number): string {
  const canvas = document.createElement("canvas");
  canvas.width = columns;
  canvas.height = rows;
  const context = canvas.getContext("2d")!;
  for (let patch = 0; patch < rows * columns; patch++) {
    const part = Math.min(1, Math.max(0, share(patch)));
    context.globalAlpha = 0.6 + 0.34 * part;
    context.fillStyle = heat(part);
    context.fillRect(patch % columns, Math.floor(patch / columns), 1, 1);
  }
  return canvas.toDataURL("image/png");
}

/** The head whose attention differs most from query to query: there is something to see. */
function liveliest({ document }: Page, example: Example, heads: Iterable<number>): number {
  let [best = 0] = heads;
  let most = -1;
  for (const head of heads) {
    const { weights, peak } = thumbnail(document, example, head)!;
    let spread = 0;
    for (let column = 0; column < weights.columns; column++) {
      let sum = 0;
      let squares = 0;
      for (let row = 0; row < weights.rows; row++) {
        sum += weights.at(row, column);
        squares += weights.at(row, column) ** 2;
      }
      spread += peak ** 2 * (squares / weights.rows - (sum / weights.rows) ** 2);
    }
    if (spread > most) [best, most] = [head, spread];
  }
  return best;
}
