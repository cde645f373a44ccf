// One head: its attention on an example, and what is known about it over the whole corpus.
import { doubts } from "../doubts";
import { exampleChoice } from "../draw/examples";
import { html, type Child } from "../draw/element";
import { measured } from "../draw/number";
import { attention, type Attention, type Weights } from "../maps";
import { measure, roleName } from "../measures";
import type { Page } from "../page";
import { current } from "../state";
import { importance, profile, rank, roles, shares } from "./head/evidence";
import { heat, overview } from "./head/heat";
import { lines } from "./head/lines";
import { silenced, twins } from "./head/others";
import { SHORT, type Zoom } from "./head/zoom";
import { title } from "./heads";

/** the numbers above everything else */
const TILES = ["entropy", "confidence", "distance", "output_norm", "redundancy"];

export function head(root: HTMLElement, page: Page): () => void {
  const { document, state, words } = page;
  let close = () => {};

  function draw(): void {
    close();
    const now = current(state.now);
    const name = `${document.header.model}-head-${document.heads.name[now]}`;
    const known = [profile(page, now, name), shares(page, now, name), roles(page, now, name), importance(page, now, name)];
    const alike = twins(page, now, name);
    close = alike?.close ?? close;
    root.replaceChildren(
      bar(page, now),
      ...doubts(page, now),
      tiles(page, now),
      html("section", { class: "seen", "aria-label": words.onExample }, ...seen(now, name)),
      html("section", { class: "known", "aria-label": words.onCorpus }, ...known, alike?.figure, silenced(page, now, name)),
    );
  }

  /** The example: lines and heat map; of a long one also the overview that moves their window. */
  function seen(now: number, name: string): Child[] {
    const example = document.examples[state.now.example];
    if (!example) return [];
    const found = attention(document, example, now);
    if (!found) return [html("p", { class: "note" }, words.notOnExample)];
    const long = Math.max(found.queries.length, found.keys.length) > SHORT && (found.exact || found.pooled);
    if (!found.exact && page.live) void page.live.exact(document, example, now).then((came) => came && current(state.now) === now && draw(), () => {});
    const box = html("div", { class: "pairs" });
    const fill = (zoom: Zoom) => {
      page.tip.hide();
      box.replaceChildren(...(isExact(found) ? [lines(page, found, zoom, name), heat(page, found, zoom, name)] : [html("p", { class: "note" }, words.noExact)]));
    };
    const start = { row: 0, column: 0 };
    fill(start);
    return [long ? html("div", { class: "whole" }, overview(page, found, start, fill, name)) : null, box];
  }

  draw();
  const end = state.subscribe(draw, "selected", "example");
  return () => {
    end();
    close();
  };
}

function isExact(found: Attention): found is Attention & { exact: Weights } {
  return found.exact !== null;
}

/** Which head, its neighbours, its roles, and the example. */
function bar(page: Page, now: number): HTMLElement {
  const { document, state, words } = page;
  const { heads } = document;
  const go = (head: number) => {
    state.set({ selected: [head] });
  };
  const select = html("select", { "aria-label": words.chooseHead, "data-control": "head", onchange: () => go(Number(select.value)) });
  for (const stack of document.stacks)
    for (const layer of stack.layers) {
      const group = html("optgroup", { label: layer.site });
      for (const head of layer.heads) group.append(html("option", { value: head, selected: head === now }, title(document, head, words)));
      select.append(group);
    }
  const step = (by: number, label: string, sign: string) =>
    html("button", { type: "button", class: "step", "aria-label": label, "data-step": by, onclick: () => go((now + by + heads.name.length) % heads.name.length) }, sign);
  const claimed = (document.roles?.heads[now] ?? []).filter((one) => one.claimed);
  return html(
    "div",
    { class: "headbar" },
    html("div", { class: "pick" }, step(-1, words.previousHead, "‹"), select, step(1, words.nextHead, "›")),
    html("h2", {}, title(document, now, words)),
    html("div", { class: "tags" }, ...claimed.map((one) => html("span", { class: "tag" }, roleName(one.role, words)))),
    document.examples.length ? exampleChoice(page, [...document.examples.keys()], state.now.example) : null,
  );
}

function tiles(page: Page, now: number): HTMLElement {
  const { document, words } = page;
  const row = html("dl", { class: "tiles" });
  for (const key of TILES) {
    if (key === "redundancy" ? !document.redundancy : !document.heads.metrics[key]) continue;
    const one = measure(document, key, words);
    const place = rank(one.mean, now);
    row.append(
      html(
        "div",
        { title: one.tells, "data-tile": key, "data-value": one.mean[now] },
        html("dt", {}, key === "redundancy" ? words.metrics["twin_distance"]!.name : one.name),
        html("dd", {}, measured(one.mean[now], one.se[now]), html("span", { class: "faint" }, place === null ? "" : words.rank(place, document.heads.name.length))),
      ),
    );
  }
  return row;
}
