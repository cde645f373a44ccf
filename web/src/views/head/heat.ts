// Attention as a heat map. Short inputs are drawn as they are; long ones as an overview of blocks with a window on it,
// and the window drawn exactly.
import { chart } from "../../draw/chart";
import type { Token } from "../../document";
import { html, svg, unique } from "../../draw/element";
import { number, percent } from "../../draw/number";
import { picture } from "../../draw/pixels";
import { fit, plain, textWidth } from "../../draw/tokens";
import { pool, type Attention, type Weights } from "../../maps";
import type { Page } from "../../page";
import { around, at, SHORT, type Zoom } from "./zoom";

const WIDEST = 104;

/** The exact map, or the window of it. */
export function heat(page: Page, attention: Attention & { exact: Weights }, zoom: Zoom, name: string): HTMLElement {
  const { words, colours, tip } = page;
  const { queries, keys, exact } = attention;
  const rows = Math.min(queries.length, SHORT);
  const columns = Math.min(keys.length, SHORT);
  const numbered = queries.length > SHORT || keys.length > SHORT;
  const weight = (row: number, column: number) => exact.at(zoom.row + row, zoom.column + column);
  let peak = 0;
  for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) peak = Math.max(peak, weight(row, column));
  const figure = chart({
    title: numbered ? words.heatWindow(at(zoom.row), at(zoom.row + rows - 1), at(zoom.column), at(zoom.column + columns - 1)) : words.heat,
    note: words.heatNote,
    name: `${name}-weights`,
    words,
    rows: () => matrix(queries, keys, exact),
  });

  const text = (token: Token, place: number) => {
    const { prefix, text: word } = fit(token, WIDEST - (numbered ? 30 : 0), 11);
    return prefix + word + (numbered ? ` ${at(place)}` : "");
  };
  const rowNames = Array.from({ length: rows }, (_, row) => text(queries[zoom.row + row]!, zoom.row + row));
  const columnNames = Array.from({ length: columns }, (_, column) => text(keys[zoom.column + column]!, zoom.column + column));
  const room = (names: string[]) => Math.ceil(Math.max(24, ...names.map((name) => textWidth(name, 11)))) + 12;
  const left = room(rowNames);
  const above = room(columnNames);
  const size = Math.max(11, Math.min(28, Math.floor((540 - left) / columns)));
  const width = left + size * columns + 8;
  const height = above + size * rows + 44;
  const axes = svg("g", { class: "axis", "aria-hidden": "true" });
  for (const [row, name] of rowNames.entries())
    axes.append(svg("text", { x: left - 6, y: above + size * (row + 0.5) + 4, "text-anchor": "end" }, name));
  for (const [column, name] of columnNames.entries()) {
    const x = left + size * (column + 0.5) + 4;
    axes.append(svg("text", { x, y: above - 6, transform: `rotate(-90 ${x} ${above - 6})` }, name));
  }
  const map = picture(rows, columns, (row, column) => (peak ? weight(row, column) / peak : 0), colours);
  const image = svg("image", { href: map, x: left, y: above, width: size * columns, height: size * rows, preserveAspectRatio: "none" });
  const cross = svg("rect", { class: "cross", width: size, height: size, "data-screen-only": "" });
  cross.style.display = "none";
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${width} ${height}`, width, height, class: "heat", role: "img", "aria-label": `${figure.figure.querySelector("h3")!.textContent}. ${words.heatNote}` },
    axes,
    image,
    cross,
    scale(page, peak, left, above + size * rows + 12),
  );
  image.addEventListener("pointermove", (event) => {
    const box = image.getBoundingClientRect();
    const row = Math.min(rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * rows)));
    const column = Math.min(columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * columns)));
    cross.style.display = "";
    cross.setAttribute("x", String(left + size * column));
    cross.setAttribute("y", String(above + size * row));
    tip.show(
      event,
      html("div", { class: "pair" }, html("bdi", {}, plain(queries[zoom.row + row]!)), "→", html("bdi", {}, plain(keys[zoom.column + column]!))),
      html("div", { class: "pair" }, html("span", {}, words.weight), html("b", {}, number(weight(row, column)))),
      html("div", { class: "faint" }, `${at(zoom.row + row)} → ${at(zoom.column + column)}`),
    );
  });
  image.addEventListener("pointerleave", () => {
    cross.style.display = "none";
    tip.hide();
  });
  figure.body.append(drawing);
  return figure.figure;
}

/** The whole of a long input as blocks, with the window on it: click, drag, or use the sliders. */
export function overview(page: Page, attention: Attention, zoom: Zoom, move: (zoom: Zoom) => void, name: string): HTMLElement {
  const { words, colours, tip } = page;
  const { queries, keys, exact } = attention;
  const side = 320;
  const blocks = exact
    ? pool(exact, 128)
    : { weights: attention.pooled!, rowSize: attention.rowSize, columnSize: attention.columnSize };
  const { weights } = blocks;
  const about = (exact ? words.overviewNote : words.overviewPooled)(blocks.rowSize, blocks.columnSize);
  let peak = 0;
  for (let row = 0; row < weights.rows; row++) for (let column = 0; column < weights.columns; column++) peak = Math.max(peak, weights.at(row, column));
  const figure = chart({
    title: words.overview,
    note: about + (exact ? ` ${words.overviewMove}` : ""),
    name: `${name}-overview`,
    words,
    rows: () => [
      ["first_query", "first_key", exact ? "largest_weight" : "weight"],
      ...Array.from({ length: weights.rows * weights.columns }, (_, i) => {
        const [row, column] = [Math.floor(i / weights.columns), i % weights.columns];
        return [row * blocks.rowSize, column * blocks.columnSize, Number(weights.at(row, column).toFixed(5))];
      }),
    ],
  });
  const map = picture(weights.rows, weights.columns, (row, column) => (peak ? weights.at(row, column) / peak : 0), colours);
  const image = svg("image", { href: map, x: 40, y: 20, width: side, height: side, preserveAspectRatio: "none" });
  const frame = svg("rect", { class: "window", "data-screen-only": "" });
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${side + 48} ${side + 66}`, width: side + 48, height: side + 66, class: "overview", role: "img", "aria-label": `${words.overview}. ${about}` },
    svg("g", { class: "axis" },
      svg("text", { x: 40, y: 13 }, at(0)),
      svg("text", { x: 40 + side / 2, y: 13, "text-anchor": "middle" }, `${words.keysWord} →`),
      svg("text", { x: 40 + side, y: 13, "text-anchor": "end" }, at(keys.length - 1)),
      svg("text", { x: 34, y: 30, "text-anchor": "end" }, at(0)),
      svg("text", { x: 34, y: 20 + side, "text-anchor": "end" }, at(queries.length - 1))),
    image,
    exact ? frame : null,
    scale(page, peak, 40, side + 30),
  ); // prettier-ignore
  figure.body.append(drawing);

  const place = (event: MouseEvent) => {
    const box = image.getBoundingClientRect();
    const row = Math.min(queries.length - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * queries.length)));
    const column = Math.min(keys.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * keys.length)));
    return { row, column };
  };
  image.addEventListener("pointermove", (event) => {
    const { row, column } = place(event);
    const largest = weights.at(Math.floor(row / blocks.rowSize), Math.floor(column / blocks.columnSize));
    tip.show(event, html("div", { class: "pair" }, html("span", {}, exact ? words.largestWeight : words.strongest), html("b", {}, percent(largest))), html("div", { class: "faint" }, `${at(row)} → ${at(column)}`));
  });
  image.addEventListener("pointerleave", () => tip.hide());
  if (exact) {
    let now = zoom;
    const sliders = html("div", { class: "sliders" });
    const slider = (what: "row" | "column", label: string, length: number) => {
      const id = unique("slider");
      const input = html("input", { type: "range", id, min: 0, max: Math.max(0, length - SHORT), "data-zoom": what, oninput: () => go(slid(what, input.valueAsNumber)) });
      input.disabled = length <= SHORT;
      sliders.append(html("label", { for: id }, label), input);
      return input;
    };
    const inputs = { row: slider("row", words.firstQuery, queries.length), column: slider("column", words.firstKey, keys.length) };
    // a window along the diagonal is what one mostly wants of self-attention
    const together = html("input", { type: "checkbox", "data-zoom": "together", checked: queries.length === keys.length });
    const slid = (what: "row" | "column", value: number): Zoom =>
      together.checked
        ? { row: Math.min(value, Math.max(0, queries.length - SHORT)), column: Math.min(value, Math.max(0, keys.length - SHORT)) }
        : { ...now, [what]: value };
    sliders.append(html("label", { class: "together" }, together, " ", words.together));
    const put = () => {
      frame.setAttribute("x", String(40 + (side * now.column) / keys.length));
      frame.setAttribute("y", String(20 + (side * now.row) / queries.length));
      frame.setAttribute("width", String(side * Math.min(1, SHORT / keys.length)));
      frame.setAttribute("height", String(side * Math.min(1, SHORT / queries.length)));
      for (const what of ["row", "column"] as const) {
        inputs[what].value = String(now[what]);
        inputs[what].setAttribute("aria-valuetext", at(now[what]));
      }
    };
    const go = (next: Zoom) => {
      now = next;
      put();
      move(now);
    };
    put();
    figure.body.append(sliders);
    image.style.cursor = "crosshair";
    image.addEventListener("click", (event) => {
      const { row, column } = place(event);
      go(around(row, column, queries.length, keys.length));
    });
  }
  return figure.figure;
}

/** From 0 to the largest weight. */
function scale(page: Page, peak: number, x: number, y: number): SVGGElement {
  const bar = picture(1, 128, (_, column) => column / 127, page.colours);
  return svg(
    "g",
    { class: "axis", transform: `translate(${x},${y})`, "aria-hidden": "true" },
    svg("text", { x: 0, y: 9 }, page.words.weight),
    svg("image", { href: bar, x: 60, y: 1, width: 140, height: 9, preserveAspectRatio: "none" }),
    svg("text", { x: 60, y: 24, "text-anchor": "middle" }, "0"),
    svg("text", { x: 200, y: 24, "text-anchor": "middle" }, number(peak)),
  );
}

function matrix(queries: Token[], keys: Token[], weights: Weights): (string | number)[][] {
  const rows: (string | number)[][] = [["query", "query_token", "key", "key_token", "weight"]];
  for (const [row, query] of queries.entries())
    for (const [column, key] of keys.entries()) rows.push([row, query.text, column, key.text, Number(weights.at(row, column).toFixed(5))]);
  return rows;
}
