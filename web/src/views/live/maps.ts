// Every head as a cell that is silenced by a click: its map of the input, or a measure; and what one head looks at.
import { chart } from "../../draw/chart";
import { html, svg } from "../../draw/element";
import { unverified } from "../../doubts";
import { grid, spoken, type Cell, type Grid } from "../../draw/grid";
import { number, percent } from "../../draw/number";
import { sheet, type Sheet } from "../../draw/pixels";
import { radios } from "../../draw/radios";
import { plain, tokenElement } from "../../draw/tokens";
import type { Example } from "../../document";
import { attention, thumbnail } from "../../maps";
import { received } from "../../rollout";
import { current } from "../../state";
import { headMap, title, type HeadMap } from "../heads";
import type { Bench, Part } from "../live";
import { placed, tilesOf } from "../places";

const LARGEST = 72;
const SMALLEST = 20;
const GAP = 3;
const DWELL = 200; // milliseconds on a head after which its exact attention to a long text is fetched
const SHOWN = 400; // tokens that are written out

export function maps(bench: Bench): Part {
  const { live, page } = bench;
  const { document, state, words, colours } = page;
  let numbers = false;
  let cells: Grid | undefined;
  let table: HeadMap | undefined;
  let paper: Sheet | undefined;
  let places: Cell[] = [];
  let placedAs = "";
  let drawn: Example | undefined;
  let query = -1;
  let dwelling: number | undefined;

  const figure = chart({ title: words.live.maps, note: words.live.mapsNote, name: `${document.header.model}-live`, words, rows });
  const note = html("p", { class: "note changed", hidden: true }, words.live.mapsNoteSilenced);
  const choice = radios(words.live.show, [words.live.asMaps, words.live.asNumbers], () => Number(numbers), (index) => {
    numbers = index === 1;
    draw();
  });
  figure.controls.append(choice.element);
  const looks = html("div", { class: "looks", "data-part": "looks" });
  const numbersLine = html("div", { class: "head-numbers", "aria-hidden": "true" });
  // of a deep model, the maps are many screens: tokens and head numbers stay above them
  const stays = html("div", { class: "stays", "data-part": "stays" }, looks, numbersLine);
  const place = html("div", {}, figure.figure);
  figure.body.before(note, stays);
  const element = html("div", { class: "heads-live" }, place);

  function toggle(head: number): void {
    const { silenced } = state.now;
    state.set({ selected: [head] });
    if (unverified(document, head)) {
      page.announce(words.live.notSilenced);
      return;
    }
    bench.silence(silenced.includes(head) ? silenced.filter((one) => one !== head) : [...silenced, head]);
  }

  function draw(): void {
    figure.figure.classList.toggle("bare", numbers);
    drawn = live.attended?.example;
    if (numbers) {
      drop();
      table = headMap(page, { pick: toggle });
      place.replaceChildren(figure.figure, table.figure);
      figure.body.replaceChildren();
      table.draw();
    } else {
      table?.close();
      table = undefined;
      place.replaceChildren(figure.figure);
      if (drawn) drawMaps(drawn);
    }
    mark();
    look();
  }

  function drop(): void {
    cells?.close();
    table?.close();
    cells = table = paper = undefined;
    numbersLine.replaceChildren();
    stays.classList.remove("covers");
    placedAs = "";
  }

  /** The maps; cells stay where they are as long as the heads do, so that who walks through them goes on. */
  function drawMaps(example: Example): void {
    const { cells: found, labels, numbers: columns, size, width, height } = placed(page, example, { width: figure.body.clientWidth || 700, left: 26, smallest: SMALLEST, largest: LARGEST, gap: GAP });
    const layout = JSON.stringify([width, height, found.map(({ head, x, y }) => [head, x, y])]);
    places = found;
    if (layout === placedAs && cells) return;
    placedAs = layout;
    cells?.close();
    cells = grid({
      page,
      label: words.live.maps,
      cells: places,
      content: () => [
        svg("rect", { class: "glass", width: size, height: size }),
        svg("path", { class: "crossed", d: `M4 4L${size - 4} ${size - 4}M${size - 4} 4L4 ${size - 4}` }),
      ],
      tip: (head) => [
        html("strong", {}, title(document, head, words)),
        html("div", { class: "pair" }, html("span", {}, words.strongest), html("b", {}, number(thumbnail(document, drawn, head)?.peak))),
        state.now.silenced.includes(head) ? html("div", { class: "faint" }, words.live.silencedHead) : null,
        unverified(document, head) ? html("div", { class: "faint" }, words.live.notSilenced) : null,
      ],
      pick: toggle,
    });
    paper = sheet(svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, class: "glance" }, labels, cells.element), colours);
    figure.body.replaceChildren(paper.element);
    const texts = columns.map(({ x, text }) => svg("text", { x, y: 11, "text-anchor": "middle" }, text));
    stays.classList.toggle("covers", document.stacks.length === 1); // over the same numbers in the drawing
    numbersLine.replaceChildren(svg("svg", { viewBox: `0 0 ${width} 14`, width, height: 14 }, svg("g", { class: "axis" }, ...texts)));
  }

  function mark(): void {
    note.hidden = !state.now.silenced.length || numbers;
    if (!cells || !paper) return;
    const off = new Set(state.now.silenced);
    paper.paint(tilesOf(page, drawn, places, { opacity: (head) => (off.has(head) ? 0.22 : 1) }));
    for (const { head } of places) {
      const cell = cells.cell(head)!;
      cell.classList.toggle("silenced", off.has(head));
      cell.setAttribute("aria-label", spoken(page, head, title(document, head, words) + (off.has(head) ? `, ${words.live.silencedHead}` : "")));
    }
  }

  /** The tokens, shaded by how much attention they get from all queries, or from the one that was chosen. */
  function look(): void {
    const head = state.now.hovered ?? (state.now.selected.length ? current(state.now) : null);
    const seen = head === null ? null : attention(document, live.attended?.example, head);
    const name = head === null ? "" : document.heads.name[head]!;
    if (live.attended?.example.kind === "image") {
      looks.replaceChildren(html("p", { class: "note" }, words.live.looksPicture), html("button", { type: "button", class: "go", onclick: () => page.open("picture") }, words.live.openPicture));
      return;
    }
    if (!seen) {
      looks.replaceChildren(html("p", { class: "note" }, words.live.looksHint), live.attended ? written(live.attended.example) : "");
      return;
    }
    window.clearTimeout(dwelling);
    if (!seen.exact) dwelling = window.setTimeout(() => void live.exact(document, live.attended!.example, head!).then((came) => came && look(), () => {}), DWELL);
    if (query >= seen.queries.length) query = -1;
    const weights = received(seen, query);
    const most = Math.max(1e-9, ...weights);
    looks.replaceChildren(
      html("p", { class: "note" }, query < 0 ? words.live.looks(name) : words.live.looksFrom(name, plain(seen.queries[query]!, 20))),
      html(
        "p",
        { class: "tokens", dir: "auto" },
        ...seen.keys.slice(0, SHOWN).map((token, index) => {
          const one = tokenElement(token, 24);
          const share = Math.sqrt((weights[index] ?? 0) / most);
          one.classList.add("shaded");
          one.style.setProperty("--share", share.toFixed(3));
          one.title = percent(weights[index]);
          if (seen.queries === seen.keys || seen.queries.length === seen.keys.length) {
            one.classList.toggle("query", index === query);
            one.addEventListener("click", () => {
              query = query === index ? -1 : index;
              look();
            });
          }
          return one;
        }),
        seen.keys.length > SHOWN ? " …" : "",
      ),
    );
  }

  function written(example: Example): HTMLElement {
    const axis = Object.values(example.tokens)[0] ?? [];
    return html("p", { class: "tokens", dir: "auto" }, ...axis.slice(0, SHOWN).map((token) => tokenElement(token, 24)), axis.length > SHOWN ? " …" : "");
  }

  function rows(): (string | number)[][] {
    const example = live.attended?.example;
    return [
      ["head", "site", "row", "column", "weight"],
      ...document.heads.name.flatMap((name, head) => {
        const map = thumbnail(document, example, head);
        if (!map) return [];
        const { rows: height, columns, at } = map.weights;
        return Array.from({ length: height * columns }, (_, i) => {
          const [row, column] = [Math.floor(i / columns), i % columns];
          return [name, document.heads.site[head]!, row, column, Number((at(row, column) * map.peak).toPrecision(4))];
        });
      }),
    ];
  }

  const ends = [state.subscribe(look, "hovered", "selected"), state.subscribe(mark, "silenced")];
  return {
    element,
    update() {
      if (live.attended?.example !== drawn) draw();
      element.classList.toggle("stale", bench.took === null);
    },
    close() {
      drop();
      window.clearTimeout(dwelling);
      for (const end of ends) end();
    },
  };
}
