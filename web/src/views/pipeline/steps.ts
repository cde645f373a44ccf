// The drawings of the pipeline: each step as matrices on the page, in the order of the way.
import { cells, signed, transposed, type Matrix } from "../../draw/cells";
import { ink, type Colours } from "../../draw/colour";
import { svg, type Child } from "../../draw/element";
import { percent } from "../../draw/number";
import { picture } from "../../draw/pixels";
import { shorten } from "../../draw/tokens";
import type { Weights } from "../../maps";
import type { Words } from "../../words";
import { shared, type Part, type Way } from "./way";

export interface Scene {
  way: Way;
  words: Words["pipeline"];
  colours: Colours;
  /** the maps of another layer, to be shown among all heads; null for the layer that is followed */
  other: { head: number; weights: Weights }[] | null;
  /** number of the head within the layer, and of the token that is followed */
  head: number;
  token: number;
}

/** A drawing that grows to the right as things are put beside each other. */
interface Canvas {
  group: SVGGElement;
  right: number;
  bottom: number;
}

const LABELS = 92; // room for the words left of a matrix
const TOP = 40; // room for the names above it

export function rowHeight(tokens: number): number {
  return Math.max(13, Math.min(24, Math.floor(250 / tokens)));
}

function begin(scene: Scene): Canvas {
  const canvas = { group: svg("g"), right: 0, bottom: 0 };
  words(canvas, scene, 0);
  return canvas;
}

function finish(canvas: Canvas, name: string): SVGSVGElement {
  const width = canvas.right + 8;
  const height = canvas.bottom + 6;
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width: 1.14 * width, role: "group", "aria-label": name, class: "pipeline" }, canvas.group);
}

/** The tokens as labels of rows; a click follows one. */
function words(canvas: Canvas, scene: Scene, x: number): void {
  const height = rowHeight(scene.way.tokens.length);
  for (const [row, word] of scene.way.tokens.entries())
    canvas.group.append(
      svg(
        "text",
        {
          x: x + LABELS - 8,
          y: TOP + (row + 0.5) * height,
          "text-anchor": "end",
          "dominant-baseline": "central",
          class: row === scene.token ? "word followed" : "word",
          "data-token": row,
        },
        word,
      ),
    );
  canvas.right = x + LABELS;
}

function sign(canvas: Canvas, text: string, y: number, room = 34): void {
  canvas.group.append(svg("text", { x: canvas.right + room / 2, y, class: "sign", "text-anchor": "middle", "dominant-baseline": "central" }, text));
  canvas.right += room;
}

/** An arrow to the right with a word above it. */
function arrow(canvas: Canvas, text: string | Child[], y: number, room = 84): void {
  const from = canvas.right + 12;
  const to = canvas.right + room - 12;
  canvas.group.append(
    svg("path", { class: "arrow", d: `M${from},${y}H${to}m-6,-5l6,5l-6,5` }),
    svg("text", { x: (from + to) / 2, y: y - 9, "text-anchor": "middle", class: "soft" }, ...(typeof text === "string" ? [text] : text)),
  );
  canvas.right += room;
}

interface Look {
  name: string;
  title: string;
  shape: string;
  width: number;
  height: number;
  colour: (value: number | null) => string;
  /** the row that is followed */
  row?: number;
  y?: number;
  tokens?: "rows" | "columns" | "both";
  /** whether columns are missing at the right */
  cut?: boolean;
  strong?: boolean;
}

/** A matrix with its title above and its shape below. */
function matrix(canvas: Canvas, values: Matrix, look: Look): { x: number; y: number; width: number; height: number } {
  const x = canvas.right;
  const y = look.y ?? TOP;
  const width = look.width * (values[0]?.length ?? 0);
  const height = look.height * values.length;
  canvas.group.append(
    svg("text", { x: x + width / 2, y: y - 10, "text-anchor": "middle", class: look.strong ? "title strong" : "title" }, look.title),
    cells(values, { x, y, width: look.width, height: look.height, colour: look.colour, name: look.name, ...(look.tokens ? { tokens: look.tokens } : {}) }),
    svg("rect", { x: x - 0.5, y: y - 0.5, width: width + 0.5, height: height + 0.5, class: look.strong ? "frame strong" : "frame" }),
    svg("text", { x: x + width / 2, y: y + height + 16, "text-anchor": "middle", class: "shape" }, look.shape),
  );
  if (look.row !== undefined && look.row < values.length)
    canvas.group.append(svg("rect", { x: x - 1.5, y: y + look.row * look.height - 1.5, width: width + 2, height: look.height + 2, class: "follow" }));
  canvas.right = x + width;
  if (look.cut) {
    canvas.group.append(svg("text", { x: canvas.right + 4, y: y + height / 2, class: "soft", "dominant-baseline": "central" }, "⋯"));
    canvas.right += 16;
  }
  canvas.bottom = Math.max(canvas.bottom, y + height + 16);
  return { x, y, width, height };
}

/** Cards behind a matrix: there is one for every head. */
function deck(canvas: Canvas, box: { width: number; height: number }, heads: number): void {
  const cards = Math.min(heads - 1, 5);
  for (let i = cards; i > 0; i--)
    canvas.group.append(
      svg("rect", { x: canvas.right + 4 * i, y: TOP - 4 * i, width: box.width, height: box.height, class: "card" }),
    );
}

function shape(numbers: readonly number[] | undefined): string {
  return (numbers ?? []).join(" × ");
}

function cut(part: Part): boolean {
  return part.columns > (part.values[0]?.length ?? 0);
}

/** Words, their numbers, and the vectors that stand for them. */
export function vectors(scene: Scene): SVGSVGElement {
  const { way, colours, words } = scene;
  const canvas = begin(scene);
  const height = rowHeight(way.tokens.length);
  const middle = TOP + (height * way.tokens.length) / 2;
  if (way.ids.length) {
    canvas.group.append(svg("text", { x: canvas.right + 30, y: TOP - 10, "text-anchor": "middle", class: "title" }, words.ids));
    for (const [row, id] of way.ids.entries())
      canvas.group.append(
        svg("text", { x: canvas.right + 52, y: TOP + (row + 0.5) * height, "text-anchor": "end", "dominant-baseline": "central", class: row === scene.token ? "id followed" : "id" }, id),
      );
    canvas.right += 60;
    arrow(canvas, way.later ? words.before : words.lookUp, middle, way.later ? 100 : 76);
  }
  const parts: [string, Part | null][] = [["embedding", way.embedding], ["positions", way.positions], ["input", way.input]];
  let first = true;
  for (const [name, part] of parts) {
    if (!part) continue;
    if (name === "input" && !way.later) arrow(canvas, words.sum, middle, 88);
    else if (!first) sign(canvas, "+", middle);
    first = false;
    matrix(canvas, part.values, {
      name: words.matrices[name]!,
      title: words.matrices[name]!,
      shape: shape(way.shapes[name]),
      width: 6.5,
      height,
      colour: signed(part.values, colours.dark),
      row: scene.token,
      cut: cut(part),
    });
  }
  return finish(canvas, words.steps.vectors.title);
}

/** The same input, seen three times by one head. */
export function projections(scene: Scene): SVGSVGElement {
  const { way, colours, words, head } = scene;
  const canvas = begin(scene);
  const height = rowHeight(way.tokens.length);
  const middle = TOP + (height * way.tokens.length) / 2;
  if (way.input) {
    const few = way.input.values.map((row) => row.slice(0, 16));
    matrix(canvas, few, {
      name: words.matrices["input"]!, title: "X", shape: shape(way.shapes["input"]), width: 6.5, height,
      colour: signed(way.input.values, colours.dark), row: scene.token, cut: true,
    }); // prettier-ignore
  }
  const three: [string, string, Part[]][] = [["Q", "query", way.query], ["K", "key", way.key], ["V", "value", way.value]];
  for (const [letter, name, parts] of three) {
    const at = shared(head, way.query.length, parts.length);
    const part = parts[at];
    if (!part) continue;
    arrow(canvas, times(letter), middle, 78);
    const box = { width: 13 * (part.values[0]?.length ?? 0), height: height * part.values.length };
    deck(canvas, box, parts.length);
    canvas.group.append(svg("rect", { x: canvas.right, y: TOP, ...box, class: "paper" }));
    matrix(canvas, part.values, {
      name: `${words.matrices[name]} ${at}`, title: "", shape: shape(part.values.length < way.length ? [way.length, part.columns] : [part.values.length, part.columns]),
      width: 13, height, colour: signed(part.values, colours.dark), row: scene.token, strong: true,
    }); // prettier-ignore
    canvas.group.append(
      svg("text", { x: canvas.right - box.width / 2, y: TOP + box.height + 34, "text-anchor": "middle", class: "title strong" }, `${letter}${digits(at)} · ${words.matrices[name]}`),
      svg("text", { x: canvas.right - box.width / 2, y: TOP + box.height + 51, "text-anchor": "middle", class: "soft" }, words.meaning[name]!),
    );
    canvas.right += 24; // the cards behind it
    canvas.bottom = Math.max(canvas.bottom, TOP + box.height + 54);
  }
  return finish(canvas, words.steps.projections.title);
}

/** One head: queries meet keys, and the weights gather the values. */
export function attention(scene: Scene): SVGSVGElement {
  const { way, colours, words, head, token } = scene;
  const canvas = begin(scene);
  const height = rowHeight(way.tokens.length);
  const n = way.tokens.length;
  const middle = TOP + (height * n) / 2;
  const query = way.query[head];
  const kv = shared(head, way.query.length, way.key.length);
  const key = way.key[kv];
  const value = way.value[kv];
  const weights = way.weights[head]!;
  const output = way.outputs[head];
  const peak = largest(weights);
  const strength = (weight: number) => colours.ramp(weight / peak);
  const of = (part: Part) => ({ width: 9, height, colour: signed(part.values, colours.dark) });
  if (query && key) {
    matrix(canvas, query.values, { ...of(query), name: `${words.matrices["query"]} ${head}`, title: `Q${digits(head)}`, shape: shape([way.length, query.columns]), row: token });
    sign(canvas, "×", middle, 26);
    const turned = transposed(key.values);
    const tall = 9 * turned.length;
    matrix(canvas, turned, {
      name: `${words.matrices["key"]} ${kv}`, title: `K${digits(kv)}ᵀ`, shape: shape([key.columns, way.length]), width: height, height: 9,
      colour: signed(key.values, colours.dark), y: middle - tall / 2, tokens: "columns",
    }); // prettier-ignore
    const scores = way.scores[head];
    if (scores) {
      sign(canvas, "=", middle, 28);
      const raw = matrix(canvas, scores, {
        name: `${words.matrices["scores"]} ${head}`, title: "", shape: shape([way.length, way.length]), width: height, height,
        colour: (score) => (score === null ? colours.nothing : signed(scores, colours.dark)(score)), row: token, tokens: "both",
      }); // prettier-ignore
      canvas.group.append(svg("text", { x: raw.x + raw.width / 2, y: raw.y + raw.height + 34, "text-anchor": "middle", class: "title" }, words.matrices["scores"]!));
    }
    arrow(canvas, "softmax", middle, 92);
  }
  const box = matrix(canvas, weights, {
    name: `${words.matrices["weights"]} ${head}`, title: "", shape: shape([way.length, way.length]), width: height, height,
    colour: (weight) => (weight === null ? colours.nothing : strength(weight)), row: token, strong: true, tokens: "both",
  }); // prettier-ignore
  canvas.group.append(svg("text", { x: box.x + box.width / 2, y: box.y + box.height + 34, "text-anchor": "middle", class: "title strong" }, words.matrices["weights"]!));
  canvas.bottom = Math.max(canvas.bottom, box.y + box.height + 36);
  if (height >= 22)
    for (const [row, numbers] of weights.entries())
      for (const [column, weight] of numbers.entries())
        if (weight !== null && weight >= 0.095)
          canvas.group.append(
            svg("text", { x: box.x + (column + 0.5) * height, y: box.y + (row + 0.5) * height, class: "inside", fill: ink(strength(weight)), "text-anchor": "middle", "dominant-baseline": "central" }, percent(weight).replace("%", "")),
          );
  for (const [column, word] of way.tokens.entries())
    canvas.group.append(svg("text", { class: "key", transform: `translate(${box.x + (column + 0.5) * height},${TOP - 6}) rotate(-45)`, "dominant-baseline": "central" }, shorten(word, 8)));
  if (value && output) {
    sign(canvas, "×", middle, 30);
    matrix(canvas, value.values, { ...of(value), name: `${words.matrices["value"]} ${kv}`, title: `V${digits(kv)}`, shape: shape([way.length, value.columns]) });
    sign(canvas, "=", middle, 30);
    matrix(canvas, output.values, { ...of(output), name: `${words.matrices["heads"]} ${head}`, title: `${words.head} ${head}`, shape: shape([way.length, output.columns]), row: token, strong: true });
  }
  return finish(canvas, words.steps.attention.title);
}

/** Every head's weights side by side; a click chooses one. */
export function everyHead(scene: Scene): SVGSVGElement {
  const { way, colours, words, head } = scene;
  const n = way.tokens.length;
  const drawn = scene.other ?? way.weights.map((weights, number) => ({ head: number, weights: { rows: n, columns: n, at: (row: number, column: number) => weights[row]?.[column] ?? 0 } }));
  const rows = Math.ceil(drawn.length / 8);
  const columns = Math.ceil(drawn.length / rows);
  const size = Math.min(150, 1080 / columns - 18);
  const width = columns * (size + 18);
  const height = rows * (size + 34);
  const group = svg("g");
  for (const [i, { head: number, weights }] of drawn.entries()) {
    const chosen = !scene.other && number === head;
    const x = (i % columns) * (size + 18) + 6;
    const y = Math.floor(i / columns) * (size + 34) + 22;
    let peak = 1e-9;
    for (let row = 0; row < weights.rows; row++) for (let column = 0; column < weights.columns; column++) peak = Math.max(peak, weights.at(row, column));
    const url = picture(weights.rows, weights.columns, (row, column) => weights.at(row, column) / peak, colours);
    const line = size / weights.rows;
    group.append(
      svg(
        "g",
        { transform: `translate(${x},${y})`, class: chosen ? "tile chosen" : "tile", ...(scene.other ? {} : { "data-head-number": number }) },
        svg("text", { x: 0, y: -7, class: "title" }, `${words.head} ${number}`),
        svg("image", { href: url, width: size, height: size, preserveAspectRatio: "none", class: "pixels" }),
        svg("rect", { x: -1, y: -1, width: size + 2, height: size + 2, class: chosen ? "frame strong" : "frame" }),
        svg("rect", { x: -1, y: scene.token * line - 1, width: size + 2, height: line + 2, class: "follow" }),
      ),
    );
  }
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, role: "group", "aria-label": words.steps.heads.title, class: "pipeline" }, group);
}

/** The heads' results side by side, and what the output projection makes of them. */
export function joined(scene: Scene): SVGSVGElement {
  const { way, colours, words, head } = scene;
  const canvas = begin(scene);
  const height = rowHeight(way.tokens.length);
  const middle = TOP + (height * way.tokens.length) / 2;
  if (way.joined) {
    const columns = way.joined.values[0]?.length ?? 1;
    const each = columns / way.weights.length;
    const width = Math.max(1, Math.min(13, 620 / columns));
    const box = matrix(canvas, way.joined.values, {
      name: words.matrices["joined"]!, title: "", shape: shape(way.shapes["joined"]), width, height,
      colour: signed(way.joined.values, colours.dark), row: scene.token,
    }); // prettier-ignore
    const band = each * width;
    for (let i = 0; i < way.weights.length; i++) {
      const x = box.x + i * band;
      const chosen = i === head;
      canvas.group.append(
        svg("rect", { x: x + 1, y: TOP - 8, width: Math.max(1, band - 2), height: 5, class: chosen ? "band chosen" : "band", "data-head-number": i }),
        chosen || band > 24
          ? svg("text", { x: x + band / 2, y: TOP - 14, "text-anchor": "middle", class: chosen ? "title strong" : "soft", "data-head-number": i }, i)
          : "",
      );
      if (i > 0) canvas.group.append(svg("line", { x1: x - 0.5, x2: x - 0.5, y1: TOP, y2: TOP + box.height, class: "between" }));
      if (chosen) canvas.group.append(svg("rect", { x: x - 1, y: TOP - 1, width: band + 1, height: box.height + 2, class: "frame strong" }));
    }
    arrow(canvas, times("O"), middle, 84);
  }
  if (way.projected)
    matrix(canvas, way.projected.values, {
      name: words.matrices["projected"]!, title: words.matrices["projected"]!, shape: shape(way.shapes["projected"]), width: 6.5, height,
      colour: signed(way.projected.values, colours.dark), row: scene.token, cut: cut(way.projected), strong: true,
    }); // prettier-ignore
  return finish(canvas, words.steps.joined.title);
}

function largest(values: Matrix): number {
  return Math.max(1e-9, ...values.flatMap((row) => row.map((value) => value ?? 0)));
}

/** A number as small figures below the line. */
export function digits(value: number): string {
  return String(value).replace(/\d/g, (digit) => "₀₁₂₃₄₅₆₇₈₉"[Number(digit)]!);
}

/** "× W" with a letter below the line. */
function times(letter: string): Child[] {
  return ["× W", svg("tspan", { dy: 3, class: "below" }, letter)];
}
