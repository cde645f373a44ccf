// Attention as lines: queries on the left, keys on the right, the stronger the weight the stronger the line. Several
// heads are drawn over each other, each in its colour.
import type { Example, HeadDocument, Token } from "../../document";
import { chart } from "../../draw/chart";
import { svg } from "../../draw/element";
import { percent } from "../../draw/number";
import { fit, plain, textWidth } from "../../draw/tokens";
import { attention, type Attention, type Weights } from "../../maps";
import type { Page } from "../../page";
import { at, SHORT, type Zoom } from "./zoom";

const WIDTH = 540;
const WIDEST = 170;
/** lines fainter than this are not drawn */
const FAINTEST = 0.02;
/** so many heads have colours of their own */
const MOST = 8;

/** One head's attention, to be drawn over that of others which read the same tokens. */
export interface Overlay {
  head: number;
  attention: Attention & { exact: Weights };
}

export interface LinesOptions {
  title?: string;
  /** pixels there are */
  width?: number;
}

/** Those of the picked heads that can be drawn over each other: exact, and between the same tokens as the last one. */
export function overlaid(document: HeadDocument, example: Example | undefined, picked: readonly number[]): Overlay[] {
  const some = picked.flatMap((head): Overlay[] => {
    const found = attention(document, example, head);
    return found && isExact(found) ? [{ head, attention: found }] : [];
  });
  const last = some.at(-1);
  if (!last || last.head !== picked.at(-1)) return [];
  const alike = some.filter((one) => one.attention.queries === last.attention.queries && one.attention.keys === last.attention.keys);
  return alike.slice(-MOST);
}

export function isExact(found: Attention): found is Attention & { exact: Weights } {
  return found.exact !== null;
}

/** The lines of one head, or of several in colours; picked: how many were asked for. */
export function lines(page: Page, some: readonly Overlay[], picked: number, zoom: Zoom, name: string, options: LinesOptions = {}): HTMLElement {
  const { words, colours } = page;
  const names = page.document.heads.name;
  const { queries, keys } = some.at(-1)!.attention;
  const several = some.length > 1;
  const width = options.width && options.width > 200 ? options.width : WIDTH;
  const widest = Math.min(WIDEST, 0.315 * width);
  const shownQueries = places(queries.length, zoom.row);
  const shownKeys = keys.length <= SHORT ? places(keys.length, 0) : strongest(some, shownQueries);
  const numbered = queries.length > SHORT || keys.length > SHORT;
  const colour = (order: number) => (several ? colours.kind(order) : "");
  const figure = chart({
    title: options.title ?? words.lines,
    note: [numbered ? words.linesNoteLong : words.linesNote, several ? words.linesSeveral : "", some.length < picked ? words.linesMost(some.length, picked) : ""].filter(Boolean).join(" "),
    name: `${name}-lines`,
    words,
    rows: () => [
      ["head", "query", "query_token", "key", "key_token", "weight"],
      ...some.flatMap(({ head, attention: { exact } }) =>
        shownQueries.flatMap((query) => shownKeys.map((key) => [names[head]!, query, queries[query]!.text, key, keys[key]!.text, round(exact.at(query, key))])),
      ),
    ],
  });

  const widths = [...shownQueries.map((query) => queries[query]!), ...shownKeys.map((key) => keys[key]!)].map((token) => {
    const { prefix, text } = fit(token, widest);
    return textWidth(prefix + text);
  });
  const side = Math.ceil(Math.max(52, ...widths)) + (numbered ? 42 : 8);
  const step = shownQueries.length > 30 || shownKeys.length > 30 ? 15 : 21;
  const above = several ? 46 : 26;
  const below = above + step * Math.max(shownQueries.length, shownKeys.length);
  const y = (order: number) => above + step * (order + 0.5);
  const left = side + 8;
  const right = width - side - 8;
  const middle = (left + right) / 2;
  const curves = svg("g", { class: "curves", "aria-hidden": "true" });
  let peak = 1e-9;
  for (const { attention: { exact } } of some) for (const query of shownQueries) for (const key of shownKeys) peak = Math.max(peak, exact.at(query, key)); // prettier-ignore
  const drawn: { query: number; key: number; path: SVGPathElement }[] = [];
  for (const [order, { head, attention: { exact } }] of some.entries()) // prettier-ignore
    shownQueries.forEach((query, i) =>
      shownKeys.forEach((key, j) => {
        const weight = exact.at(query, key);
        if (weight < FAINTEST) return;
        const path = svg("path", {
          d: `M${left} ${y(i)}C${middle} ${y(i)} ${middle} ${y(j)} ${right} ${y(j)}`,
          "stroke-width": strokeWidth(weight),
          "stroke-opacity": (0.1 + (0.9 * weight) / peak).toFixed(3),
          "data-of": names[head],
          ...(several ? { style: `stroke:${colour(order)}` } : {}),
        });
        drawn.push({ query, key, path });
        curves.append(path);
      }),
    );

  const from = svg("g", { role: "listbox", "aria-label": words.queries });
  const to = svg("g", { class: "keys", "aria-hidden": "true" });
  const values = svg("g", { class: "weights", "aria-hidden": "true" });
  const optionsOf = shownQueries.map((query, i) => {
    const option = svg(
      "g",
      {
        class: "token",
        role: "option",
        tabindex: i ? "-1" : "0",
        "data-query": query,
        "aria-selected": "false",
        "aria-label": words.attendsTo(plain(queries[query]!), said(query)),
      },
      svg("rect", { x: 0, y: y(i) - step / 2, width: side + 4, height: step, rx: 4 }),
      label(queries[query]!, query, side, y(i), "end", numbered, widest),
    );
    from.append(option);
    return option;
  });
  const targets = shownKeys.map((key, j) => {
    const target = svg(
      "g",
      { class: "token", "data-key": key },
      svg("rect", { x: width - side - 4, y: y(j) - step / 2, width: side + 4, height: step, rx: 4 }),
      label(keys[key]!, key, width - side, y(j), "start", numbered, widest),
    );
    to.append(target);
    return target;
  });

  /** The three strongest keys of a query, by head where there are several. */
  function said(query: number): string {
    return some
      .map(({ head, attention: { exact } }) => {
        const most = [...shownKeys].sort((a, b) => exact.at(query, b) - exact.at(query, a)).slice(0, 3);
        const list = most.map((key) => `${plain(keys[key]!)} ${percent(exact.at(query, key))}`).join(", ");
        return several ? `${list} (${words.start.head(names[head]!)})` : list;
      })
      .join("; ");
  }

  let pinned: number | null = null;
  /** Brings out the lines of one query (or to one key), with their weights beside the other end. */
  function bring(query: number | null, key: number | null): void {
    const any = query !== null || key !== null;
    curves.classList.toggle("some", any);
    for (const line of drawn) line.path.classList.toggle("on", line.query === query || line.key === key);
    for (const [i, option] of optionsOf.entries()) {
      option.classList.toggle("on", shownQueries[i] === query);
      option.setAttribute("aria-selected", String(shownQueries[i] === query));
    }
    for (const [j, target] of targets.entries()) target.classList.toggle("on", shownKeys[j] === key);
    values.replaceChildren();
    const write = (at: (exact: Weights) => number, x: number, order: number, anchor: string) => {
      const least = several ? FAINTEST : 0.005;
      const parts = some.flatMap(({ attention: { exact } }, i) =>
        at(exact) >= least ? [svg("tspan", { ...(several ? { style: `fill:${colour(i)}` } : {}), ...(several && i ? { dx: 5 } : {}) }, percent(at(exact)))] : [],
      );
      if (parts.length) values.append(svg("text", { x, y: y(order) + 4, "text-anchor": anchor }, ...parts));
    };
    if (query !== null) shownKeys.forEach((one, j) => write((exact) => exact.at(query, one), right - 6, j, "end"));
    if (key !== null) shownQueries.forEach((one, i) => write((exact) => exact.at(one, key), left + 6, i, "start"));
  }
  const numberOf = (event: Event, kind: string) => {
    const found = (event.target as Element).closest<SVGElement>(`[data-${kind}]`);
    return found ? Number(found.dataset[kind]) : null;
  };
  for (const group of [from, to]) {
    group.addEventListener("pointerover", (event) => bring(numberOf(event, "query"), numberOf(event, "key")));
    group.addEventListener("pointerleave", () => bring(pinned, null));
  }
  from.addEventListener("click", (event) => {
    const query = numberOf(event, "query");
    pinned = query === pinned ? null : query;
    bring(pinned, null);
  });
  from.addEventListener("focusin", (event) => bring(numberOf(event, "query"), null));
  from.addEventListener("focusout", () => bring(pinned, null));
  from.addEventListener("keydown", (event) => {
    const now = optionsOf.findIndex((option) => option === document.activeElement);
    const step = { ArrowDown: 1, ArrowUp: -1, Home: -now, End: optionsOf.length - 1 - now }[event.key];
    if (step === undefined || now < 0) return;
    event.preventDefault();
    const next = optionsOf[Math.max(0, Math.min(optionsOf.length - 1, now + step))]!;
    optionsOf[now]!.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });

  const height = below + 24;
  figure.body.append(
    svg(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, width, height, class: "lines" },
      several ? legend(some.map(({ head }) => names[head]!), colour) : null,
      svg("g", { class: "axis", "aria-hidden": "true" },
        svg("text", { x: side, y: above - 12, "text-anchor": "end" }, words.queries),
        svg("text", { x: width - side, y: above - 12 }, words.keysWord)),
      curves, from, to, values,
      scale(words.linesScale, peak, middle, below + 16),
    ),
  ); // prettier-ignore
  return figure.figure;
}

function strokeWidth(weight: number): string {
  return (0.6 + 3.4 * weight).toFixed(2);
}

/** Which colour is which head. */
function legend(names: string[], colour: (order: number) => string): SVGGElement {
  const group = svg("g", { class: "legend" });
  let x = 4;
  for (const [order, name] of names.entries()) {
    group.append(svg("rect", { x, y: 3, width: 12, height: 12, rx: 3, style: `fill:${colour(order)}` }), svg("text", { x: x + 17, y: 13, "data-legend": name }, name));
    x += 30 + textWidth(name);
  }
  return group;
}

/** What the lines are worth: weak, half and the strongest. */
function scale(name: string, peak: number, middle: number, y: number): SVGGElement {
  const group = svg("g", { class: "axis", "aria-hidden": "true", transform: `translate(${middle - 92},${y})` }, svg("text", { x: -4, y: 0, "text-anchor": "end" }, name));
  for (const [i, share] of [0.1, 0.5, 1].entries())
    group.append(
      svg("path", { class: "sample", d: `M${6 + i * 70} -4h24`, "stroke-width": strokeWidth(share * peak), "stroke-opacity": (0.1 + 0.9 * share).toFixed(2) }),
      svg("text", { x: 34 + i * 70, y: 0 }, percent(share * peak)),
    );
  return group;
}

function places(length: number, start: number): number[] {
  return length <= SHORT ? [...Array(length).keys()] : Array.from({ length: SHORT }, (_, i) => start + i).filter((place) => place < length);
}

/** The keys that some query looks at most, in their order. */
function strongest(some: readonly Overlay[], queries: number[]): number[] {
  const columns = some[0]!.attention.exact.columns;
  const most = Array.from({ length: columns }, (_, key) => Math.max(...some.flatMap(({ attention: { exact } }) => queries.map((query) => exact.at(query, key)))));
  return [...most.keys()].sort((a, b) => most[b]! - most[a]!).slice(0, SHORT).sort((a, b) => a - b);
}

/** A token's text, with its number where the input is long. */
function label(token: Token, place: number, x: number, y: number, anchor: "start" | "end", numbered: boolean, widest: number): SVGTextElement {
  const { prefix, text, special } = fit(token, widest);
  const number = numbered ? svg("tspan", { class: "soft", ...(anchor === "end" ? {} : { dx: 7 }) }, at(place)) : null;
  const gap = numbered && anchor === "end" ? { dx: 7 } : {};
  const word = svg("tspan", { class: special ? "special" : null, ...(prefix ? {} : gap) }, text);
  const parts = [prefix ? svg("tspan", { class: "soft", ...gap }, prefix) : null, word];
  return svg("text", { x, y: y + 4, "text-anchor": anchor }, ...(anchor === "end" ? [number, ...parts] : [...parts, number]));
}

function round(weight: number): number {
  return Number(weight.toFixed(5));
}
