// Encoder and decoder: which words of the source each word of the target was written from.
import { chart, type Chart } from "../draw/chart";
import { html, svg } from "../draw/element";
import { percent } from "../draw/number";
import { picture } from "../draw/pixels";
import { radios } from "../draw/radios";
import { plain } from "../draw/tokens";
import type { Example } from "../document";
import { attention, pool, thumbnail, type Weights } from "../maps";
import type { Page } from "../page";
import { current } from "../state";
import { alignmentMatrix } from "./alignment/matrix";
import { LONGEST, ribbon } from "./alignment/ribbon";
import { among, headAmong, layersOf } from "./among";
import { title } from "./heads";
import { tiles } from "./tiles";

type Mode = "head" | "layer" | "all";
const MODES: Mode[] = ["head", "layer", "all"];

export function alignment(root: HTMLElement, page: Page): () => void {
  const { document, state, colours } = page;
  const words = page.words.alignment;
  const crossed = (one: Example) => one.maps.filter((map) => map.queries !== map.keys);
  const { example, choices, close: again } = among(page, (one) => crossed(one).length > 0);
  const sites = crossed(example).map((map) => map.site);
  const heads = [...document.heads.name.keys()].filter((head) => sites.includes(document.heads.site[head]!));
  const known = new Map<number, Weights>();
  for (const head of heads) {
    const exact = attention(document, example, head)?.exact;
    if (exact) known.set(head, exact);
  }
  const map = crossed(example)[0]!;
  const [queries, keys] = [example.tokens[map.queries] ?? [], example.tokens[map.keys] ?? []];

  root.append(choices);
  if (!known.size) {
    root.append(html("p", { class: "note" }, words.nothing));
    return again;
  }

  let mode: Mode = "head";
  let head = headAmong(page, (one) => known.has(one), () => sharpest(known));
  let target: number | null = null;
  const modes = radios(words.show, MODES.map((one) => words.modes[one]), () => MODES.indexOf(mode), (i) => {
    mode = MODES[i]!;
    draw();
  });
  choices.append(html("span", { class: "choice" }, html("span", { class: "label" }, words.show), modes.element));

  const rows = () => {
    const weights = shown();
    return [
      ["head", "target", "target_token", "source", "source_token", "weight"],
      ...queries.flatMap((query, row) => keys.map((key, column) => [name(), row, plain(query), column, plain(key), Number(weights.at(row, column).toPrecision(5))])),
    ];
  };
  const short = queries.length <= LONGEST && keys.length <= LONGEST;
  const linesChart: Chart | null = short ? chart({ title: words.lines, note: words.linesNote, name: "alignment-lines", words: page.words, rows }) : null;
  const matrixChart = chart({ title: words.matrix, note: words.matrixNote, name: "alignment", words: page.words, rows });
  const every = chart({
    title: words.every,
    note: words.everyNote,
    name: "alignment-of-every-head",
    words: page.words,
    rows: () => [
      ["head", "target", "source", "weight"],
      ...[...known].flatMap(([one, weights]) => queries.flatMap((_, row) => keys.map((__, column) => [document.heads.name[one]!, row, column, Number(weights.at(row, column).toPrecision(5))]))),
    ],
  });
  const said = html("p", { class: "reading", "aria-live": "polite" });
  if (linesChart) {
    linesChart.figure.append(said);
    root.append(linesChart.figure);
  }
  root.append(html("div", { class: "pictures" }, matrixChart.figure, every.figure));

  const ratio = Math.max(0.4, Math.min(2.5, queries.length / Math.max(1, keys.length)));
  const size = ratio > 1 ? { width: 96 / ratio, height: 96 } : { width: 96, height: 96 * ratio };
  const layers = layersOf(document, (one) => heads.includes(one) && !!thumbnail(document, example, one));
  const many = tiles({
    page,
    label: words.every,
    layers,
    ...size,
    content: (one) => {
      const exact = known.get(one);
      const small = exact ? pool(exact, 128).weights : thumbnail(document, example, one)!.weights;
      const url = picture(small.rows, small.columns, small.at, colours);
      return [svg("image", { ...size, href: url, preserveAspectRatio: "none", class: "pixels" })];
    },
    tip: (one) => [title(document, one, page.words)],
    pick: (one) => {
      if (!known.has(one)) return;
      mode = "head";
      head = one;
      state.set({ selected: [one] });
      draw();
    },
  });
  every.body.append(many.drawing);

  function name(): string {
    if (mode === "all") return words.modes.all;
    return mode === "layer" ? words.layer(document.heads.layer[head]!) : title(document, head, page.words);
  }

  /** The chosen head's weights, or the mean over those heads that the report has. */
  function shown(): Weights {
    if (mode === "head") return known.get(head)!;
    const site = document.heads.site[head];
    const members = [...known].filter(([one]) => mode === "all" || document.heads.site[one] === site).map(([, weights]) => weights);
    return { rows: queries.length, columns: keys.length, at: (row, column) => members.reduce((sum, one) => sum + one.at(row, column), 0) / members.length };
  }

  let follow: (one: number | null) => void = () => {};
  let options: SVGGElement[] = [];

  function draw(): void {
    modes.update();
    const weights = shown();
    const matrix = alignmentMatrix(weights, queries, keys, `${words.matrix}: ${name()}`, colours);
    matrixChart.body.replaceChildren(matrix.drawing);
    const lines = linesChart && ribbon(weights, queries, keys, `${words.lines}: ${name()}`, { above: words.source, below: words.target });
    if (lines) linesChart.body.replaceChildren(lines.drawing);
    options = lines?.targets ?? [];
    follow = (one) => {
      matrix.follow(one);
      lines?.follow(one);
      said.textContent = reading(weights, one);
    };
    follow(target);
    home(target ?? 0);
    for (const one of heads) {
      const part = mode === "all" || (mode === "layer" ? document.heads.site[one] === document.heads.site[head] : one === head);
      many.grid.cell(one)?.classList.toggle("current", part);
    }
  }

  function reading(weights: Weights, one: number | null): string {
    if (one === null) return words.choose(name());
    const order = [...keys.keys()].sort((a, b) => weights.at(one, b) - weights.at(one, a)).slice(0, 3);
    const most = order.map((key) => `“\u2068${plain(keys[key]!)}\u2069” ${percent(weights.at(one, key))}`).join(", ");
    return words.reading(`“\u2068${plain(queries[one]!)}\u2069”`, most, name());
  }

  function home(one: number): void {
    for (const [i, option] of options.entries()) option.setAttribute("tabindex", i === one ? "0" : "-1");
  }

  const targetOf = (event: Event) => {
    const found = (event.target as Element).closest<SVGElement>("[data-target], [data-query]");
    const place = found?.dataset["target"] ?? found?.dataset["query"];
    return place === undefined ? null : Number(place);
  };
  const over = (event: Event) => {
    const one = targetOf(event);
    follow(one ?? target);
    const cell = (event.target as Element).closest<SVGElement>("[data-value]");
    if (!cell) return page.tip.hide();
    const [query, key] = [Number(cell.dataset["query"]), Number(cell.dataset["key"])];
    page.tip.show(event as PointerEvent, html("b", {}, percent(Number(cell.dataset["value"]))), html("br"), html("bdi", {}, plain(queries[query]!)), " ← ", html("bdi", {}, plain(keys[key]!)));
  };
  const out = () => {
    follow(target);
    page.tip.hide();
  };
  const click = (event: Event) => {
    const one = targetOf(event);
    if (one === null) return;
    target = one === target ? null : one;
    follow(target);
  };
  for (const body of [linesChart?.body, matrixChart.body]) {
    body?.addEventListener("pointerover", over);
    body?.addEventListener("pointerleave", out);
    body?.addEventListener("click", click);
  }
  linesChart?.body.addEventListener("keydown", (event) => {
    const at = targetOf(event);
    if (at === null) return;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1, Home: -at, End: options.length - 1 - at }[event.key];
    if (event.key === " " || event.key === "Enter") click(event);
    else if (step !== undefined) {
      target = Math.max(0, Math.min(options.length - 1, at + step));
      follow(target);
      home(target);
      options[target]!.focus();
    } else return;
    event.preventDefault();
  });
  const end = state.subscribe(() => {
    const chosen = current(state.now);
    if (!known.has(chosen) || chosen === head) return;
    head = chosen;
    draw();
  }, "selected");
  draw();
  return () => {
    end();
    again();
    many.grid.close();
  };
}

/** The head with the largest weights on average: the one that aligns. */
function sharpest(known: Map<number, Weights>): number {
  let best = known.keys().next().value!;
  let most = -1;
  for (const [head, weights] of known) {
    // a head that always looks at one and the same place is sharp, too, and aligns nothing
    const seen = new Set<number>();
    let sum = 0;
    for (let row = 0; row < weights.rows; row++) {
      let at = 0;
      for (let column = 1; column < weights.columns; column++) if (weights.at(row, column) > weights.at(row, at)) at = column;
      sum += weights.at(row, at);
      seen.add(at);
    }
    const score = (sum / weights.rows) * (seen.size / Math.min(weights.rows, weights.columns));
    if (score > most) [best, most] = [head, score];
  }
  return best;
}
