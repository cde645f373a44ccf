// The pipeline: one sentence from its words to the output of multi-head attention, each step as numbers one can see.
import { signed, type Matrix } from "../draw/cells";
import type { Example } from "../document";
import { chart } from "../draw/chart";
import { html, svg, type Child } from "../draw/element";
import { exampleChoice } from "../draw/examples";
import { number, percent } from "../draw/number";
import { radios } from "../draw/radios";
import type { Cell } from "../draw/save";
import { attention as attentionOf, type Weights } from "../maps";
import type { Page } from "../page";
import { current } from "../state";
import { attention, everyHead, joined, projections, vectors, type Scene } from "./pipeline/steps";
import { shared, way, type Way } from "./pipeline/way";

type Step = "vectors" | "projections" | "attention" | "heads" | "joined";
const DRAW: Record<Step, (scene: Scene) => SVGSVGElement> = { vectors, projections, attention, heads: everyHead, joined };

export function pipeline(root: HTMLElement, page: Page): () => void {
  const { document, state, colours } = page;
  const words = page.words.pipeline;
  const examples = document.examples.flatMap((example, index) => (example.pipeline ? [index] : []));
  const index = examples.includes(state.now.example) ? state.now.example : examples[0]!;
  const wanted = document.examples[state.now.example];
  if (wanted && page.live) void page.live.pipeline(wanted).then((came) => came && state.now.view === "pipeline" && page.redraw(), () => {});
  const seen = way(document, document.examples[index]!);
  if (!seen) return () => {};
  const found = seen.heads.indexOf(current(state.now));
  const first = interesting(seen);
  const chosen = state.now.selected.length > 0 && found >= 0;
  const scene: Scene = { way: seen, words, colours, token: first.token, head: chosen ? found : first.head, other: null };

  const heads = radios(words.chooseHead, seen.weights.map((_, i) => String(i)), () => scene.head, (i) => {
    scene.head = i;
    const picked = seen.heads[i];
    if (picked !== undefined) state.set({ selected: [picked] });
    draw();
  });
  const tokens = radios(words.chooseToken, seen.tokens, () => scene.token, (i) => {
    scene.token = i;
    draw();
  });
  const said = html("p", { class: "reading", "aria-live": "polite" });

  const follow = html(
    "div",
    { class: "follow-bar" },
    examples.length > 1 ? exampleChoice(page, examples, index) : null,
    html("div", { class: "row" }, html("span", { class: "label" }, words.chooseToken), tokens.element),
    html("div", { class: "row" }, html("span", { class: "label" }, words.chooseHead), heads.element),
  );
  root.append(
    html("p", { class: "lead" }, words.lead(seen.weights.length, String(document.heads.layer[seen.heads[0] ?? 0] ?? 0))),
    legend(page),
    follow,
  );

  // of the layers that follow, the maps are in the page; a server has their queries, keys and values, too
  const example = document.examples[index]!;
  const layers = document.stacks.find((stack) => stack.layers.some((layer) => layer.site === seen.site))?.layers.map((layer) => ({ ...layer, maps: mapsOf(page, example, layer.heads, seen.tokens.length) })).filter((layer) => layer.site === seen.site || layer.maps.length) ?? [];
  let layerAt = Math.max(0, layers.findIndex((layer) => layer.site === seen.site));
  const layerChoice = radios(words.layer, layers.map((layer) => String(layer.layer)), () => layerAt, (i) => {
    const { site, maps } = layers[i]!;
    if (page.live && example.request) return void page.live.pipeline(example, site).then((came) => came && state.now.view === "pipeline" && page.redraw(), () => {});
    layerAt = i;
    scene.other = site === seen.site ? null : maps;
    draw();
  });
  if (page.live && layers.length > 1) follow.append(html("div", { class: "row" }, html("span", { class: "label" }, words.layer), layerChoice.element));

  const charts = (Object.keys(DRAW) as Step[]).map((step, i) => {
    const text = words.steps[step];
    const one = chart({
      title: `${i + 1}. ${text.title}`,
      note: step === "vectors" && seen.later ? words.laterNote : text.note,
      name: `pipeline-${i + 1}-${step}`,
      words: page.words,
      rows: () => rows(step, scene),
    });
    const formula = html("p", { class: "formula" });
    one.figure.insertBefore(formula, one.body);
    if (step === "attention") one.figure.append(said);
    if (step === "heads" && !page.live && layers.length > 1) one.controls.append(html("span", { class: "label" }, words.layer), layerChoice.element);
    root.append(one.figure);
    if (i < 4) root.append(html("div", { class: "down", "aria-hidden": "true" }, svg("svg", { viewBox: "0 0 24 30", width: 24, height: 30 }, svg("path", { d: "M12,2V26m-7,-8l7,8l7,-8", class: "arrow" }))));
    return { step, one, formula };
  });

  function draw(): void {
    heads.update();
    layerChoice.update();
    tokens.update();
    for (const { step, one, formula } of charts) {
      formula.replaceChildren(...FORMULA[step](scene).map((part) => (part instanceof Node ? part : new Text(String(part)))));
      one.body.replaceChildren(DRAW[step](scene));
    }
    said.textContent = reading(scene);
  }

  const point = (event: Event) => {
    const cell = (event.target as Element).closest<SVGElement>("[data-value]");
    const matrix = cell?.closest<SVGElement>("[data-matrix]");
    if (!cell || !matrix) return page.tip.hide();
    const row = Number(cell.dataset["row"]);
    const column = Number(cell.dataset["column"]);
    const { tokens } = seen;
    const place =
      matrix.dataset["tokens"] === "both"
        ? `${tokens[row]} → ${tokens[column]}`
        : matrix.dataset["tokens"] === "columns"
          ? `${tokens[column]} · ${words.channel(row)}`
          : `${tokens[row]} · ${words.channel(column)}`;
    const value = number(Number(cell.dataset["value"]), 4);
    page.tip.show(event as PointerEvent, html("b", {}, value), html("br"), `${matrix.dataset["matrix"]}: `, html("bdi", {}, place));
  };
  const click = (event: Event) => {
    const target = event.target as Element;
    const head = target.closest<SVGElement>("[data-head-number]")?.dataset["headNumber"];
    const token = target.closest<SVGElement>("[data-token]")?.dataset["token"] ?? rowOf(target);
    if (head !== undefined) heads.pick(Number(head));
    else if (token !== undefined) tokens.pick(Number(token));
  };
  root.addEventListener("pointermove", point);
  root.addEventListener("click", click);
  draw();
  const end = state.subscribe(() => {
    const at = seen.heads.indexOf(current(state.now));
    if (at >= 0 && at !== scene.head) {
      scene.head = at;
      draw();
    }
  }, "selected");
  const other = state.subscribe(() => page.redraw(), "example");
  return () => {
    end();
    other();
    root.removeEventListener("pointermove", point);
    root.removeEventListener("click", click);
  };
}

/** What the colours mean. */
function legend({ words, colours }: Page): HTMLElement {
  const both = signed([[-1, 1]], colours.dark);
  const bar = (colour: (share: number) => string) =>
    svg("svg", { viewBox: "0 0 90 12", width: 90, height: 12, "aria-hidden": "true" }, ...Array.from({ length: 15 }, (_, i) => svg("rect", { x: 6 * i, y: 0, width: 6.2, height: 12, fill: colour(i / 14) })));
  const entry = (drawn: SVGSVGElement, text: string) => html("div", {}, html("dt", {}, drawn), html("dd", {}, text));
  return html(
    "dl",
    { class: "marks", "aria-label": words.start.legendLabel },
    entry(bar((share) => both(2 * share - 1)), words.pipeline.legendSigned),
    entry(bar((share) => colours.ramp(share)), words.pipeline.legendWeights),
  );
}

/** The maps of these heads on an example: exact, as many tokens as are followed, or small where there is no room. */
function mapsOf({ document }: Page, example: Example, heads: readonly number[], tokens: number): { head: number; weights: Weights }[] {
  return heads.flatMap((head) => {
    const exact = attentionOf(document, example, head)?.exact;
    const number = document.heads.head[head]!;
    if (exact && exact.rows === exact.columns) return [{ head: number, weights: { rows: Math.min(tokens, exact.rows), columns: Math.min(tokens, exact.columns), at: exact.at } }];
    return [];
  });
}

/** The row of a cell whose rows are tokens. */
function rowOf(target: Element): string | undefined {
  const cell = target.closest<SVGElement>("[data-row]");
  return cell?.closest<SVGElement>("[data-tokens]")?.dataset["tokens"] === "columns" ? cell.dataset["column"] : cell?.dataset["row"];
}

/** Where to begin: the head and the token of the largest weight between different words that are no neighbours. */
function interesting(seen: Way): { head: number; token: number } {
  let best = { head: 0, token: 0 };
  let most = -1;
  const word = (place: number) => /^[-·]?\p{L}/u.test(seen.tokens[place] ?? "");
  for (const [head, weights] of seen.weights.entries())
    for (const [token, row] of weights.entries())
      for (const [key, weight] of row.entries())
        if (Math.abs(token - key) > 1 && word(token) && word(key) && seen.ids[token] !== seen.ids[key] && (weight ?? 0) > most) {
          best = { head, token };
          most = weight ?? 0;
        }
  return best;
}

/** What the head does with the followed token, in words. */
function reading({ way: seen, words, head, token }: Scene): string {
  const row = seen.weights[head]?.[token] ?? [];
  const order = [...row.keys()].sort((a, b) => (row[b] ?? 0) - (row[a] ?? 0)).slice(0, 3);
  const parts = order.map((key) => `${quoted(seen.tokens[key])} ${percent(row[key])}`);
  return words.reading(quoted(seen.tokens[token]), String(head), parts.join(", "));
}

/** A token inside a sentence, kept from changing the sentence's direction. */
function quoted(word: string | undefined): string {
  return `“\u2068${word ?? ""}\u2069”`;
}

const v = (name: string) => html("i", {}, name);
const low = (name: Child) => html("sub", {}, name);

/** What each step computes. */
const FORMULA: Record<Step, (scene: Scene) => Child[]> = {
  vectors: ({ way: seen, words }) => {
    if (seen.later) return [v("x"), low("i"), " = ", words.before, " ( ", v("E"), "[", v("id"), low("i"), "], … )"];
    const sum = [v("E"), "[", v("id"), low("i"), "]", ...(seen.positions ? [" + ", v("P"), low("i")] : [])];
    return [v("x"), low("i"), " = ", ...(seen.input ? ["norm( ", ...sum, " )"] : sum)];
  },
  projections: ({ way: seen, head }) => {
    const kv = shared(head, seen.query.length, seen.key.length);
    const one = (letter: string, at: number) => [v(letter), low(at), " = ", v("X"), " ", v("W"), html("sup", {}, letter), low(at)];
    return [...one("Q", head), ",  ", ...one("K", kv), ",  ", ...one("V", kv)];
  },
  attention: ({ way: seen, head, words }) => {
    const kv = shared(head, seen.query.length, seen.key.length);
    return [
      words.head, low(head), " = softmax( ", v("Q"), low(head), " ", v("K"), low(kv), html("sup", {}, "⊤"), " ∕ √", seen.query[0]?.columns ?? "d", " ) ", v("V"), low(kv),
    ]; // prettier-ignore
  },
  heads: ({ way: seen, words }) => [words.head, low(0), ", …, ", words.head, low(seen.weights.length - 1)],
  joined: ({ way: seen, words }) => [
    v("Y"), " = [ ", words.head, low(0), " ∣ … ∣ ", words.head, low(seen.weights.length - 1), " ] ", v("W"), html("sup", {}, "O"),
  ], // prettier-ignore
};

/** The numbers of a step: matrix, head, token, column, value. */
function rows(step: Step, scene: Scene): Cell[][] {
  const { way: seen, head } = scene;
  const table: Cell[][] = [["matrix", "head", "row", "column", "value"]];
  const add = (name: string, number: number | null, values: Matrix | undefined, square = false) => {
    for (const [row, line] of (values ?? []).entries())
      for (const [column, value] of line.entries()) table.push([name, number, seen.tokens[row], square ? seen.tokens[column] : column, value]);
  };
  const kv = shared(head, seen.query.length, seen.key.length);
  if (step === "vectors") {
    for (const [row, id] of seen.ids.entries()) table.push(["id", null, seen.tokens[row], null, id]);
    add("embedding", null, seen.embedding?.values);
    add("positions", null, seen.positions?.values);
    add("input", null, seen.input?.values);
  } else if (step === "projections") {
    add("query", head, seen.query[head]?.values);
    add("key", kv, seen.key[kv]?.values);
    add("value", kv, seen.value[kv]?.values);
  } else if (step === "attention") {
    add("scores", head, seen.scores[head], true);
    add("weights", head, seen.weights[head], true);
    add("output", head, seen.outputs[head]?.values);
  } else if (step === "heads") {
    for (const [i, weights] of seen.weights.entries()) add("weights", i, weights, true);
  } else {
    add("joined", null, seen.joined?.values);
    add("projected", null, seen.projected?.values);
  }
  return table;
}
