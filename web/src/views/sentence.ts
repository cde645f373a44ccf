// Beside the map: the attention of the head under the pointer, or of those that are picked, on the example.
import { exampleChoice } from "../draw/examples";
import { html, type Child } from "../draw/element";
import { FOLLOWS, unfocus } from "../draw/grid";
import { picture } from "../draw/pixels";
import { attention, thumbnail } from "../maps";
import type { Page } from "../page";
import { lines, overlaid } from "./head/lines";
import { title } from "./heads";

/** first: the heads that are shown before any is picked. */
export function sentence(page: Page, first: readonly number[]): { element: HTMLElement | null; draw: () => void; close: () => void } {
  const { document, state, words, colours } = page;
  if (!document.examples.length) return { element: null, draw: () => {}, close: () => {} };
  const choice = html("div", { class: "choices" });
  const box = html("div", {});
  const element = html("div", { class: "sentence", "data-part": "sentence", ...FOLLOWS, onfocusout: (event: FocusEvent) => unfocus(page, event) }, choice, box);
  let drawn = "";

  function draw(): void {
    const { hovered, selected } = state.now;
    const picked = hovered !== null ? [hovered] : selected.length ? selected : first;
    const example = document.examples[state.now.example];
    const now = picked.at(-1) ?? 0;
    const key = `${state.now.example}:${picked.join()}`;
    if (key === drawn) return;
    drawn = key;
    element.dataset["heads"] = picked.map((head) => document.heads.name[head]).join(" ");
    const some = overlaid(document, example, picked);
    const name = picked.length > 1 && some.length > 1 ? words.start.sentences(some.length) : words.start.sentence(title(document, now, words));
    if (some.length) box.replaceChildren(lines(page, some, picked.length, { row: 0, column: 0 }, `${document.header.model}-example`, { title: name, width: Math.min(540, box.clientWidth - 34) }));
    else box.replaceChildren(html("section", { class: "chart" }, html("h3", {}, name), ...small(now)));
    const missing = some.length ? undefined : example;
    if (missing && page.live) void page.live.exact(document, missing, now).then((came) => came && ((drawn = ""), draw()), () => {});
  }

  /** Where the exact weights are not at hand: the map as a small picture. */
  function small(head: number): Child[] {
    const example = document.examples[state.now.example];
    const map = thumbnail(document, example, head);
    const why = attention(document, example, head) ? words.noExact : words.notOnExample;
    return [
      html("p", { class: "note" }, map ? words.glanceNote : why),
      map && html("img", { alt: "", width: 260, height: 260, class: "map", src: picture(map.weights.rows, map.weights.columns, map.weights.at, colours) }),
    ];
  }

  const chosen = () => choice.replaceChildren(document.examples.length > 1 ? exampleChoice(page, [...document.examples.keys()], state.now.example) : "");
  chosen();
  return { element, draw, close: state.subscribe(draw, "hovered", "selected", "example") };
}
