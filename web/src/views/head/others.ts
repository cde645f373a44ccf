// One head beside others: the heads that attend most alike, and what the model says without it.
import { chart } from "../../draw/chart";
import { html, svg } from "../../draw/element";
import { grid, type Cell } from "../../draw/grid";
import { number, percent } from "../../draw/number";
import { picture } from "../../draw/pixels";
import { shorten, visible } from "../../draw/tokens";
import { thumbnail } from "../../maps";
import { known } from "../../measures";
import type { Page } from "../../page";
import { title } from "../heads";
import { rank } from "./evidence";

const SIZE = 88;
const GAP = 18;
const WIDTH = 520;

/** The nearest heads as small maps; a click opens one. */
export function twins(page: Page, head: number, name: string): { figure: HTMLElement; close: () => void } | null {
  const { document, words, colours, state } = page;
  const nearest = document.redundancy?.nearest[head] ?? [];
  if (!nearest.length) return null;
  const figure = chart({
    title: words.twins,
    note: words.twinsNote,
    name: `${name}-twins`,
    words,
    rows: () => [["head", "site", "distance"], ...nearest.map(([other, distance]) => [document.heads.name[other]!, document.heads.site[other]!, distance])],
  });
  const example = document.examples[state.now.example];
  const cells: Cell[] = nearest.map(([other, distance], i) => ({
    head: other,
    row: 0,
    column: i,
    x: i * (SIZE + GAP),
    y: 0,
    width: SIZE,
    height: SIZE,
    label: `${title(document, other, words)}, ${words.distanceWord} ${number(distance)}`,
    attributes: { "data-value": distance },
  }));
  const drawn = grid({
    page,
    label: words.twins,
    cells,
    content: (cell) => {
      const map = thumbnail(document, example, cell.head);
      return [
        map
          ? svg("image", { href: picture(map.weights.rows, map.weights.columns, map.weights.at, colours), width: SIZE, height: SIZE, preserveAspectRatio: "none" })
          : svg("rect", { width: SIZE, height: SIZE, fill: colours.nothing }),
        svg("text", { x: SIZE / 2, y: SIZE + 16, "text-anchor": "middle", style: "font-weight:560" }, document.heads.name[cell.head]),
        svg("text", { x: SIZE / 2, y: SIZE + 31, "text-anchor": "middle", class: "soft" }, number(nearest[cell.column]![1])),
      ];
    },
    tip: (other) => [html("strong", {}, title(document, other, words)), html("div", { class: "faint" }, document.heads.site[other])],
    pick: (other) => page.open("head", other),
  });
  const width = cells.length * (SIZE + GAP);
  figure.body.append(svg("svg", { viewBox: `0 0 ${width} ${SIZE + 38}`, width, height: SIZE + 38, class: "twins" }, drawn.element));
  return { figure: figure.figure, close: drawn.close };
}

/** What changes when the head is silenced: how much, among all heads, and the answer before and after. */
export function silenced(page: Page, head: number, name: string): HTMLElement | null {
  const { document, words, state } = page;
  const example = document.examples[state.now.example];
  const silenced = example?.silenced;
  if (!silenced) return null;
  const change = silenced.change[head] ?? null;
  const before = example.answer?.items ?? [];
  const after = silenced.answer?.[head] ?? null;
  const kind = example.answer?.kind ?? "";
  // a regression with one output has no name for it
  const named = (label: string) => (kind === "amount" && /^(LABEL_0|0)$/.test(label) ? words.live.kinds["amount"]! : label);
  const place = rank(silenced.change, head);
  const labels = [...new Set([...before, ...(after ?? [])].map(([label]) => label))];
  const of = (items: [string, number][] | null, label: string) => items?.find(([one]) => one === label)?.[1] ?? null;
  const figure = chart({
    title: words.silencedTitle,
    note: [
      words.silencedNote,
      example.label ? `${words.right(shorten(visible(example.label), 80))}` : "",
      !after && before[0] ? words.saysNow(words.live.kinds[kind] ?? kind, shorten(visible(before[0][0]), 160), show(before[0][1], kind)) : "",
      place === null ? "" : words.change(number(change), words.said(silenced.measure ?? ""), place, known(silenced.change).length),
    ].filter(Boolean).join(" "),
    name: `${name}-silenced`,
    words,
    rows: () => [
      ["answer", "before", "silenced"],
      ...labels.map((label) => [label, of(before, label), of(after, label)]),
      ["change", 0, change],
    ],
  });
  const values = known(silenced.change);
  const top = Math.max(...values, 1e-12);
  const x = (value: number) => 4 + (WIDTH - 12) * Math.max(0, value / top);
  const height = 44 + (after ? 22 + 40 * labels.length : 0);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, width: WIDTH, height, role: "img", "aria-label": `${words.silencedTitle}: ${number(change)}` });
  drawing.append(
    svg("path", { class: "others", d: values.map((value) => `M${x(value).toFixed(1)} 8v14`).join("") }),
    svg("g", { class: "axis" }, svg("line", { x1: 4, x2: WIDTH - 8, y1: 26, y2: 26 }), svg("text", { x: 4, y: 39 }, words.noChange), svg("text", { x: WIDTH - 8, y: 39, "text-anchor": "end" }, words.mostChange)),
  );
  if (change !== null) drawing.append(svg("circle", { class: "score own", cx: x(change), cy: 15, r: 5.5, "data-change": change }));
  if (after) {
    const most = Math.max(1e-12, ...[...before, ...after].map(([, score]) => Math.abs(score)));
    const length = (score: number | null) => 150 * (Math.abs(score ?? 0) / most);
    drawing.append(svg("g", { class: "axis" }, svg("text", { x: 300, y: 58 }, svg("tspan", { class: "old" }, "■ "), words.beforeSilence, svg("tspan", { class: "own", dx: 12 }, "■ "), words.afterSilence)));
    labels.forEach((label, i) => {
      const y = 66 + 40 * i;
      drawing.append(
        svg("text", { x: 288, y: y + 18, "text-anchor": "end" }, shorten(visible(named(label)), 38)),
        svg("rect", { class: "old", x: 300, y: y + 2, width: length(of(before, label)), height: 12, rx: 2 }),
        svg("rect", { class: "bar", x: 300, y: y + 16, width: length(of(after, label)), height: 12, rx: 2 }),
        svg("text", { x: 306 + length(of(before, label)), y: y + 12, class: "soft", style: "font-size:11px" }, show(of(before, label), kind)),
        svg("text", { x: 306 + length(of(after, label)), y: y + 26, style: "font-size:11px" }, show(of(after, label), kind)),
      );
    });
  }
  figure.body.append(drawing);
  return figure.figure;
}

/** A probability in percent, an amount or a cosine as it is. */
function show(score: number | null, kind: string): string {
  return score === null ? "–" : kind === "amount" || kind === "neighbours" ? number(score) : percent(score);
}
