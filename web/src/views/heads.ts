// The overview: what this is, what stands out, and the head map: layers x heads, one cell for each head, coloured by any
// measure; beside it the attention of one head on the example, below it that head's numbers.
import { ticks } from "d3-array";
import { chart } from "../draw/chart";
import { ink } from "../draw/colour";
import { html, svg, type Child } from "../draw/element";
import { grid, type Cell, type Grid } from "../draw/grid";
import { number } from "../draw/number";
import { picture } from "../draw/pixels";
import { colourOf, filters, isShare, mainRole, measure, measureKeys, roleName, written, type Measure } from "../measures";
import type { Page } from "../page";
import { standouts } from "../standouts";
import type { State } from "../state";
import type { Words } from "../words";
import { card } from "./card";
import { sentence } from "./sentence";
import { about, outstanding } from "./start";

export function heads(root: HTMLElement, page: Page): () => void {
  const some = standouts(page.document, page.words);
  const first = outstanding(page, some);
  const map = headMap(page, { several: true });
  const shown = sentence(page, some[0]?.heads ?? [0]);
  const numbers = card(page, some[0]?.heads.at(-1));
  root.append(
    about(page),
    ...(first.element ? [first.element] : []),
    html("div", { class: shown.element ? "split beside" : "split" }, html("div", { class: "under" }, map.figure, shown.element ? numbers.element : null), shown.element ?? numbers.element),
  );
  map.draw();
  shown.draw();
  return () => {
    for (const part of [first, map, shown, numbers]) part.close();
  };
}

export interface HeadMap {
  figure: HTMLElement;
  /** Draws it: to be called once its place on the page is known. */
  draw(): void;
  close(): void;
}

export interface HeadMapOptions {
  /** what a click does, instead of picking the head */
  pick?: (head: number) => void;
  /** offer to pick several heads by plain clicks, for those who have no Ctrl key */
  several?: boolean;
}

/** The map as a figure with its controls; the live page has one, too, whose clicks silence heads. */
export function headMap(page: Page, options: HeadMapOptions = {}): HeadMap {
  const { document, state, words, colours } = page;
  const figure = chart({
    title: words.headMap,
    name: `${document.header.model}-heads`,
    words,
    rows: () => table(page),
  });
  const note = html("p", { class: "note" });
  const chips = html("div", { class: "chips", role: "group", "aria-label": words.filter });
  figure.body.before(note, chips);
  const offered = filters(document, words);
  let cells: Grid | undefined;

  controls(figure.controls, page);
  let adding = false;
  if (options.several) {
    const several = html("button", { type: "button", class: "chip", "aria-pressed": "false", title: words.start.severalNote, "data-control": "several", onclick: () => several.setAttribute("aria-pressed", String((adding = !adding))) }, words.start.several);
    figure.controls.append(several);
  }
  for (const { key, name, heads } of [{ key: "", name: words.everyHead, heads: new Set(document.heads.name) }, ...offered])
    chips.append(
      html(
        "button",
        {
          type: "button",
          class: "chip",
          "data-filter": key,
          onclick: () => {
            state.set({ filter: state.now.filter === key ? "" : key });
            const chosen = offered.find((one) => one.key === state.now.filter);
            page.announce(chosen ? words.filtered(chosen.heads.size, document.heads.name.length, chosen.name) : words.everyHead);
          },
        },
        name,
        " ",
        html("span", { class: "count" }, heads.size),
      ),
    );

  function draw(): void {
    const shown = measure(document, state.now.metric, words);
    const means = { cuttable: words.cuttableMeans, redundant: words.redundantMeans }[state.now.filter];
    note.textContent = means ? `${shown.tells} ${means}` : shown.tells;
    cells?.close();
    const room = figure.body.clientWidth || 720;
    const plan = layout(page, room);
    cells = grid({
      page,
      label: `${words.headMap}: ${shown.name}`,
      cells: plan.cells.map((cell) => ({
        ...cell,
        label: spoken(page, cell.head, shown),
        attributes: { "data-metric": shown.key, "data-value": shown.mean[cell.head] ?? null, "data-se": shown.se[cell.head] ?? null },
      })),
      content: (cell) => {
        const colour = colourOf(shown, cell.head, colours);
        const value = shown.mean[cell.head];
        const text = cell.width >= 36 && cell.height >= 18 && !shown.kinds && value !== null;
        return [
          svg("rect", { x: 1, y: 1, width: cell.width - 2, height: cell.height - 2, rx: 3, fill: colour }),
          text && svg("text", { x: cell.width / 2, y: cell.height / 2 + 4, "text-anchor": "middle", class: "value", style: `fill:${ink(colour)}` }, isShare(shown.key) ? (100 * value!).toFixed(0) : short(value, shown.domain[1])),
          svg("path", { class: "crossed", d: `M3 3L${cell.width - 3} ${cell.height - 3}M${cell.width - 3} 3L3 ${cell.height - 3}` }),
        ];
      },
      tip: (head) => numbers(page, head, shown),
      ...(options.pick ? { pick: options.pick } : {}),
      adds: () => adding,
    });
    const key = legend(shown, page);
    const width = Math.max(plan.width, key.width + plan.left);
    const height = plan.height + 16 + key.height;
    key.element.setAttribute("transform", `translate(${plan.left},${plan.height + 16})`);
    figure.body.replaceChildren(
      svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "heads" }, plan.labels, cells.element, key.element),
    );
    fade();
    silenced();
  }

  function fade(): void {
    const chosen = offered.find((one) => one.key === state.now.filter);
    for (const one of chips.querySelectorAll<HTMLElement>(".chip")) one.setAttribute("aria-pressed", String(one.dataset["filter"] === state.now.filter));
    document.heads.name.forEach((_, head) => cells?.cell(head)?.classList.toggle("out", !!chosen && !chosen.heads.has(head)));
  }

  function silenced(): void {
    document.heads.name.forEach((_, head) => cells?.cell(head)?.classList.toggle("silenced", state.now.silenced.includes(head)));
  }

  const ends = [state.subscribe(draw, "metric", "sort", "filter"), state.subscribe(silenced, "silenced")];
  return {
    figure: figure.figure,
    draw,
    close() {
      cells?.close();
      for (const end of ends) end();
    },
  };
}

function controls(root: HTMLElement, page: Page): void {
  const { document, state, words } = page;
  const colour = html("select", { "aria-label": words.colourBy, "data-control": "metric", onchange: () => state.set({ metric: colour.value }) });
  const groups = new Map<string, HTMLOptGroupElement>();
  for (const key of measureKeys(document)) {
    const { group, name } = measure(document, key, words);
    if (!groups.has(group)) {
      const made = html("optgroup", { label: words.measureGroups[group] });
      groups.set(group, made);
      colour.append(made);
    }
    groups.get(group)!.append(html("option", { value: key, selected: key === state.now.metric }, name));
  }
  const sort = html("select", {
    "aria-label": words.order,
    "data-control": "sort",
    onchange: () => state.set({ sort: sort.value as State["sort"] }),
  });
  for (const [value, text] of Object.entries(words.orders)) sort.append(html("option", { value, selected: value === state.now.sort }, text));
  root.append(colour, sort);
}

type Place = Omit<Cell, "label">;

/** Where each head is drawn: in its layer at its number, in its layer by value, or all in one ranking. */
function layout(page: Page, room: number): { cells: Place[]; labels: SVGGElement; left: number; width: number; height: number } {
  const { document, state, words } = page;
  const shown = measure(document, state.now.metric, words);
  const sort = state.now.sort;
  const value = (head: number) => shown.mean[head] ?? -Infinity;
  const byValue = (some: number[]) => [...some].sort((a, b) => value(b) - value(a));
  const numberOf = (head: number) => document.heads.head[head]!;
  const layers = document.stacks.flatMap((stack) => stack.layers);
  const columns = Math.max(1, ...layers.flatMap((layer) => [layer.heads.length, ...layer.heads.map((head) => numberOf(head) + 1)]));
  const left = 46;
  const width = Math.max(11, Math.min(64, Math.floor((room - left - 4) / columns)));
  const height = Math.round(Math.max(11, Math.min(34, width * 0.72, layers.length > 28 ? 20 : 34)));
  const labels = svg("g", { class: "axis", "aria-hidden": "true" });
  const say = (x: number, y: number, text: string, anchor: string) => labels.append(svg("text", { x, y, "text-anchor": anchor }, text));
  const cells: Place[] = [];
  let row = 0;
  let y = 0;
  const place = (head: number, column: number) => cells.push({ head, row, column, x: left + column * width, y, width, height });
  if (sort === "rank") {
    y = 6;
    byValue(document.heads.name.map((_, head) => head)).forEach((head, rank) => {
      if (rank && rank % columns === 0) {
        row++;
        y += height;
      }
      if (rank % columns === 0) say(left - 8, y + height / 2 + 4, String(rank + 1), "end");
      place(head, rank % columns);
    });
    y += height;
  } else {
    document.stacks.forEach((stack, at) => {
      if (document.stacks.length > 1) {
        y += at ? 26 : 12;
        labels.append(svg("text", { x: 0, y, class: "stack" }, `${words.kinds[stack.kind] ?? stack.kind} · ${stack.name}`));
        y += 6;
      }
      y += 16;
      const most = Math.max(...stack.layers.flatMap((layer) => layer.heads.map(numberOf)));
      const every = width < 16 ? 4 : 1;
      if (sort === "place") for (let column = 0; column <= most; column += every) say(left + (column + 0.5) * width, y - 4, String(column), "middle");
      if (at === 0) say(left - 8, y - 4, words.layer, "end");
      for (const layer of stack.layers) {
        say(left - 8, y + height / 2 + 4, String(layer.layer), "end");
        if (sort === "place") for (const head of layer.heads) place(head, numberOf(head));
        else byValue(layer.heads).forEach((head, column) => place(head, column));
        row++;
        y += height;
      }
    });
  }
  return { cells, labels, left, width: left + columns * width + 4, height: y };
}

/** What the colours mean: a scale with ticks, or the kinds by name. */
function legend(shown: Measure, page: Page): { element: SVGGElement; width: number; height: number } {
  const { words, colours } = page;
  const element = svg("g", { class: "axis legend" });
  if (shown.kinds) {
    const names = [...shown.kinds.slice(0, 7), ...(shown.kinds.length > 7 ? [words.otherKinds] : [])];
    const entries = [...names.map((name, i) => [colours.kind(i), name] as const), [colours.nothing, words.noKind] as const];
    entries.forEach(([colour, name], i) => {
      const x = (i % 3) * 170;
      const y = Math.floor(i / 3) * 20;
      element.append(svg("rect", { x, y: y + 1, width: 13, height: 13, rx: 3, fill: colour }), svg("text", { x: x + 19, y: y + 12 }, name));
    });
    return { element, width: 510, height: Math.ceil(entries.length / 3) * 20 };
  }
  const width = 260;
  element.append(svg("text", { x: 0, y: 10, class: "title" }, shown.unit ? `${shown.name} (${shown.unit})` : `${shown.name} (${words.unitless})`));
  const [low, high] = shown.domain;
  // along the scale values rise; the colour follows the measure's own direction
  const reversed = shown.share(low) > shown.share(high);
  const bar = picture(1, 128, (_, column) => (reversed ? 1 - column / 127 : column / 127), colours);
  element.append(svg("image", { href: bar, x: 0, y: 17, width, height: 9, preserveAspectRatio: "none" }));
  for (const tick of high > low ? ticks(low, high, 5) : [high]) {
    const x = width * (reversed ? 1 - shown.share(tick) : shown.share(tick));
    element.append(svg("line", { x1: x, x2: x, y1: 26, y2: 30 }), svg("text", { x, y: 41, "text-anchor": "middle" }, number(isShare(shown.key) ? 100 * tick : tick, 3).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "")));
  }
  return { element, width: width + 20, height: 46 };
}

/** A value in a cell, where the largest of all is `top`. */
function short(value: number | null | undefined, top: number): string {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size !== 0 && size < 0.005 && top < 0.1) return value.toExponential(0).replace("e-", "e−").replace(/^-/, "−");
  return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : 2).replace("-", "−");
}

/** The tip: the measure shown with its standard error, role, twin, tokens. */
function numbers(page: Page, head: number, shown: Measure): Child[] {
  const { document, words } = page;
  const line = (name: string, text: string) => html("div", { class: "pair" }, html("span", {}, name), html("b", {}, text));
  const role = document.roles ? mainRole(document.roles.heads[head] ?? []) : undefined;
  const twin = document.redundancy?.twin[head] ?? -1;
  return [
    html("strong", {}, title(document, head, words)),
    line(shown.name, [written(shown, head), shown.unit].filter(Boolean).join(" ")),
    role && shown.key !== "role" ? line(words.role.name, roleName(role.role, words)) : null,
    twin >= 0 ? line(words.twin, `${document.heads.name[twin]} (${number(document.redundancy!.twin_distance[head])})`) : null,
    html("div", { class: "faint" }, words.enterOpens),
  ];
}

/** "Layer 3, head 5", with what the head was called before the model was cut. */
export function title(document: Page["document"], head: number, words: Words): string {
  const { heads, stacks } = document;
  const original = heads.original_head[head]!; // below zero for a head that was added
  const before = original >= 0 && original !== heads.head[head] ? ` (${words.once(original)})` : "";
  const kind = stacks.length > 1 ? ` · ${words.kinds[heads.kind[head]!] ?? heads.kind[head]}` : "";
  return words.headTitle(heads.layer[head]!, heads.head[head]!) + before + kind;
}

function spoken(page: Page, head: number, shown: Measure): string {
  return `${title(page.document, head, page.words)}, ${shown.name} ${[written(shown, head), shown.unit].filter(Boolean).join(" ")}`;
}

/** Every number of every head, for the CSV file. */
function table(page: Page): (string | number | null)[][] {
  const { document, words } = page;
  const { heads } = document;
  const keys = measureKeys(document);
  const measures = keys.map((key) => measure(document, key, words));
  const labels = ["verified", "notes"].filter((name) => heads.labels[name]);
  const columns = measures.flatMap((one) => (one.kinds ? [one.key] : [one.key, `${one.key}_se`]));
  return [
    ["site", "layer", "head", "original_head", "kv_head", "kind", ...labels, "tokens", ...columns],
    ...heads.name.map((_, i) => [
      heads.site[i]!, heads.layer[i]!, heads.head[i]!, heads.original_head[i]!, heads.kv_head[i]!, heads.kind[i]!, ...labels.map((name) => heads.labels[name]![i]!), heads.tokens[i] ?? null,
      ...measures.flatMap((one): (string | number | null)[] => (one.kinds ? [kindOf(one, i)] : [one.mean[i] ?? null, one.se[i] ?? null])),
    ]),
  ]; // prettier-ignore
}

function kindOf(measure: Measure, head: number): string | null {
  const mean = measure.mean[head];
  return mean === null || mean === undefined ? null : measure.kinds![mean]!;
}

