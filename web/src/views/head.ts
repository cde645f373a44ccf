// One head: its attention on an example, and what is known about it over the whole corpus.
import { doubts } from "../doubts";
import { ink } from "../draw/colour";
import { exampleChoice } from "../draw/examples";
import { html, type Child } from "../draw/element";
import { attention } from "../maps";
import { measure, measureKeys, roleName, written } from "../measures";
import type { Page } from "../page";
import { current } from "../state";
import { importance, profile, rank, roles, shares } from "./head/evidence";
import { heat, overview } from "./head/heat";
import { isExact, lines, overlaid } from "./head/lines";
import { receives } from "./head/received";
import { silenced, twins } from "./head/others";
import { SHORT, type Zoom } from "./head/zoom";
import { meanings } from "./card";
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
      meanings(page, measureKeys(document).map((key) => measure(document, key, words)).filter((one) => !one.kinds)),
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
    const room = Math.min(1160, (root.clientWidth || 1160) - 34);
    const width = room < 700 ? room : 540;
    const picked = state.now.selected.length ? state.now.selected : [now];
    const fill = (zoom: Zoom) => {
      page.tip.hide();
      if (!isExact(found)) return box.replaceChildren(html("p", { class: "note" }, words.noExact));
      const drawn = lines(page, overlaid(document, example, picked), picked.length, zoom, name, { width });
      drawn.querySelector(".note")!.before(overlayButtons(page, now));
      box.replaceChildren(drawn, heat(page, found, zoom, name));
    };
    const start = { row: 0, column: 0 };
    fill(start);
    return [long ? html("div", { class: "whole" }, overview(page, found, start, fill, name)) : null, box, isExact(found) || found.pooled ? receives(page, now, found, name, room) : null];
  }

  draw();
  const end = state.subscribe(draw, "selected", "example");
  return () => {
    end();
    close();
  };
}

/** The heads of the layer as small buttons that put their lines over those of this head. */
function overlayButtons(page: Page, now: number): HTMLElement {
  const { document, state, words, colours } = page;
  const layer = document.stacks.flatMap((stack) => stack.layers).find((one) => one.heads.includes(now))!;
  const picked = state.now.selected.length ? state.now.selected : [now];
  const shown = overlaid(document, document.examples[state.now.example], picked).map((one) => one.head);
  const bar = html("div", { class: "overlay", role: "toolbar", "aria-label": words.overlay });
  const toggle = (head: number) => {
    const rest = picked.filter((one) => one !== head && one !== now);
    // this head stays the one whose numbers are shown
    if (head !== now) state.set({ selected: picked.includes(head) ? [...rest, now] : [...rest, head, now] });
    // the view was drawn anew: go on where one was
    window.document.querySelector<HTMLElement>(`.overlay [data-overlay="${CSS.escape(document.heads.name[head]!)}"]`)?.focus();
  };
  for (const head of layer.heads) {
    const order = shown.indexOf(head);
    const colour = order < 0 ? "" : shown.length > 1 ? colours.kind(order) : "var(--accent)";
    bar.append(
      html(
        "button",
        {
          type: "button",
          "aria-pressed": String(order >= 0),
          "aria-label": title(document, head, words),
          "data-overlay": document.heads.name[head],
          tabindex: head === now ? "0" : "-1",
          ...(colour ? { style: `background:${colour};border-color:${colour};color:${colour.startsWith("#") ? ink(colour) : "var(--surface)"}` } : {}),
          onclick: () => toggle(head),
        },
        document.heads.head[head],
      ),
    );
  }
  bar.addEventListener("keydown", (event) => {
    const buttons = [...bar.querySelectorAll("button")];
    const at = buttons.findIndex((one) => one === window.document.activeElement);
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -at, End: buttons.length - 1 - at }[event.key];
    if (step === undefined || at < 0) return;
    event.preventDefault();
    buttons[(at + step + buttons.length) % buttons.length]!.focus();
  });
  return bar;
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
        html("dd", {}, written(one, now), one.unit ? html("span", { class: "unit" }, ` ${one.unit}`) : null, html("span", { class: "faint" }, place === null ? "" : words.rank(place, document.heads.name.length))),
      ),
    );
  }
  return row;
}
