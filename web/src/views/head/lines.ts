// Attention as lines: queries on the left, keys on the right, the stronger the weight the stronger the line.
import type { Token } from "../../document";
import { chart } from "../../draw/chart";
import { svg } from "../../draw/element";
import { percent } from "../../draw/number";
import { fit, plain, textWidth } from "../../draw/tokens";
import type { Attention, Weights } from "../../maps";
import type { Page } from "../../page";
import { at, SHORT, type Zoom } from "./zoom";

const WIDTH = 540;
const WIDEST = 170;
/** lines fainter than this are not drawn */
const FAINTEST = 0.02;

export function lines(page: Page, attention: Attention & { exact: Weights }, zoom: Zoom, name: string): HTMLElement {
  const { words } = page;
  const { queries, keys, exact } = attention;
  const shownQueries = places(queries.length, zoom.row);
  const shownKeys = keys.length <= SHORT ? places(keys.length, 0) : strongest(exact, shownQueries);
  const numbered = queries.length > SHORT || keys.length > SHORT;
  const figure = chart({
    title: words.lines,
    note: numbered ? words.linesNoteLong : words.linesNote,
    name: `${name}-lines`,
    words,
    rows: () => [
      ["query", "query_token", "key", "key_token", "weight"],
      ...shownQueries.flatMap((query) =>
        shownKeys.map((key) => [query, queries[query]!.text, key, keys[key]!.text, round(exact.at(query, key))]),
      ),
    ],
  });

  const widths = [...shownQueries.map((query) => queries[query]!), ...shownKeys.map((key) => keys[key]!)].map((token) => {
    const { prefix, text } = fit(token, WIDEST);
    return textWidth(prefix + text);
  });
  const side = Math.ceil(Math.max(52, ...widths)) + (numbered ? 42 : 8);
  const step = shownQueries.length > 30 || shownKeys.length > 30 ? 15 : 21;
  const height = 26 + step * Math.max(shownQueries.length, shownKeys.length);
  const y = (order: number) => 26 + step * (order + 0.5);
  const left = side + 8;
  const right = WIDTH - side - 8;
  const middle = (left + right) / 2;
  const curves = svg("g", { class: "curves", "aria-hidden": "true" });
  let peak = 0;
  for (const query of shownQueries) for (const key of shownKeys) peak = Math.max(peak, exact.at(query, key));
  const drawn: { query: number; key: number; path: SVGPathElement }[] = [];
  shownQueries.forEach((query, i) =>
    shownKeys.forEach((key, j) => {
      const weight = exact.at(query, key);
      if (weight < FAINTEST) return;
      const path = svg("path", {
        d: `M${left} ${y(i)}C${middle} ${y(i)} ${middle} ${y(j)} ${right} ${y(j)}`,
        "stroke-width": (0.6 + 3.4 * weight).toFixed(2),
        "stroke-opacity": (0.1 + (0.9 * weight) / peak).toFixed(3),
      });
      drawn.push({ query, key, path });
      curves.append(path);
    }),
  );

  const from = svg("g", { role: "listbox", "aria-label": words.queries });
  const to = svg("g", { class: "keys", "aria-hidden": "true" });
  const values = svg("g", { class: "weights", "aria-hidden": "true" });
  const options = shownQueries.map((query, i) => {
    const most = [...shownKeys].sort((a, b) => exact.at(query, b) - exact.at(query, a)).slice(0, 3);
    const said = most.map((key) => `${plain(keys[key]!)} ${percent(exact.at(query, key))}`).join(", ");
    const option = svg(
      "g",
      {
        class: "token",
        role: "option",
        tabindex: i ? "-1" : "0",
        "data-query": query,
        "aria-selected": "false",
        "aria-label": words.attendsTo(plain(queries[query]!), said),
      },
      svg("rect", { x: 0, y: y(i) - step / 2, width: side + 4, height: step, rx: 4 }),
      label(queries[query]!, query, side, y(i), "end", numbered),
    );
    from.append(option);
    return option;
  });
  const targets = shownKeys.map((key, j) => {
    const target = svg(
      "g",
      { class: "token", "data-key": key },
      svg("rect", { x: WIDTH - side - 4, y: y(j) - step / 2, width: side + 4, height: step, rx: 4 }),
      label(keys[key]!, key, WIDTH - side, y(j), "start", numbered),
    );
    to.append(target);
    return target;
  });

  let pinned: number | null = null;
  /** Brings out the lines of one query (or to one key), with their weights beside the other end. */
  function bring(query: number | null, key: number | null): void {
    const some = query !== null || key !== null;
    curves.classList.toggle("some", some);
    for (const line of drawn) line.path.classList.toggle("on", line.query === query || line.key === key);
    for (const [i, option] of options.entries()) {
      option.classList.toggle("on", shownQueries[i] === query);
      option.setAttribute("aria-selected", String(shownQueries[i] === query));
    }
    for (const [j, target] of targets.entries()) target.classList.toggle("on", shownKeys[j] === key);
    values.replaceChildren();
    const write = (weight: number, x: number, order: number, anchor: string) => {
      if (weight >= 0.005) values.append(svg("text", { x, y: y(order) + 4, "text-anchor": anchor }, percent(weight)));
    };
    if (query !== null) shownKeys.forEach((one, j) => write(exact.at(query, one), right - 6, j, "end"));
    if (key !== null) shownQueries.forEach((one, i) => write(exact.at(one, key), left + 6, i, "start"));
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
    const now = options.findIndex((option) => option === document.activeElement);
    const step = { ArrowDown: 1, ArrowUp: -1, Home: -now, End: options.length - 1 - now }[event.key];
    if (step === undefined || now < 0) return;
    event.preventDefault();
    const next = options[Math.max(0, Math.min(options.length - 1, now + step))]!;
    options[now]!.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });

  figure.body.append(
    svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${height}`, width: WIDTH, height, class: "lines" },
      svg("g", { class: "axis", "aria-hidden": "true" },
        svg("text", { x: side, y: 14, "text-anchor": "end" }, words.queries),
        svg("text", { x: WIDTH - side, y: 14 }, words.keysWord)),
      curves, from, to, values,
    ),
  ); // prettier-ignore
  return figure.figure;
}

function places(length: number, start: number): number[] {
  return length <= SHORT ? [...Array(length).keys()] : Array.from({ length: SHORT }, (_, i) => start + i).filter((place) => place < length);
}

/** The keys that some query looks at most, in their order. */
function strongest(weights: Weights, queries: number[]): number[] {
  const most = Array.from({ length: weights.columns }, (_, key) => Math.max(...queries.map((query) => weights.at(query, key))));
  return [...most.keys()].sort((a, b) => most[b]! - most[a]!).slice(0, SHORT).sort((a, b) => a - b);
}

/** A token's text, with its number where the input is long. */
function label(token: Token, place: number, x: number, y: number, anchor: "start" | "end", numbered: boolean): SVGTextElement {
  const { prefix, text, special } = fit(token, WIDEST);
  const number = numbered ? svg("tspan", { class: "soft", ...(anchor === "end" ? {} : { dx: 7 }) }, at(place)) : null;
  const gap = numbered && anchor === "end" ? { dx: 7 } : {};
  const word = svg("tspan", { class: special ? "special" : null, ...(prefix ? {} : gap) }, text);
  const parts = [prefix ? svg("tspan", { class: "soft", ...gap }, prefix) : null, word];
  return svg("text", { x, y: y + 4, "text-anchor": anchor }, ...(anchor === "end" ? [number, ...parts] : [...parts, number]));
}

function round(weight: number): number {
  return Number(weight.toFixed(5));
}
