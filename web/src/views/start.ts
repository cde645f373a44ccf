// What a first visitor reads before the map: what this is, what the marks mean, and which heads are worth a click.
import { html, svg, unique, type Child } from "../draw/element";
import { comparing } from "../measures";
import type { Page } from "../page";
import type { Standout } from "../standouts";

/** One sentence, and the legend of the marks below. */
export function about({ document, words }: Page): HTMLElement {
  const { legend, legendLabel } = words.start;
  const about = comparing(document) ? words.start.aboutChanges : words.start.about;
  const drawn = legend.slice(0, document.examples.length ? 3 : 2); // without an example there are no lines
  const box = (x: number, width: number, kind: string) => svg("rect", { x, y: 2, width, height: 12, rx: 2, class: `mark ${kind}` });
  const marks: Child[][] = [
    [box(3, 20, "")],
    [box(0, 8, "light"), box(9, 8, "middle"), box(18, 8, "")],
    [svg("path", { d: "M1 13C13 13 13 3 25 3", class: "mark line" })],
  ];
  return html(
    "div",
    { class: "about", "data-part": "about" },
    html("p", { class: "lead" }, about(document.heads.name.length, document.header.model || words.someModel)),
    html(
      "dl",
      { class: "marks", "aria-label": legendLabel },
      ...drawn.map(([name, means], i) =>
        html("div", {}, html("dt", {}, svg("svg", { viewBox: "0 0 26 16", width: 26, height: 16, "aria-hidden": "true" }, ...marks[i]!), " ", name), html("dd", {}, means)),
      ),
    ),
  );
}

/** The heads that stand out as buttons; a click shows one on the example, a pair as two colours. */
export function outstanding(page: Page, some: readonly Standout[]): { element: HTMLElement | null; close: () => void } {
  const { document, state, words } = page;
  if (!some.length) return { element: null, close: () => {} };
  const title = unique("standouts");
  const text = words.start;
  const name = ({ heads }: Standout) => {
    const [first, second] = heads.map((head) => document.heads.name[head]!);
    return second === undefined ? text.head(first!) : text.pairOf(second, first!);
  };
  const buttons = some.map((one) =>
    html(
      "button",
      { type: "button", class: "standout", "data-standout": one.kind, "data-heads": one.heads.map((head) => document.heads.name[head]).join(" "), onclick: () => state.set({ selected: [...one.heads] }) },
      html("span", { class: "kind" }, text.kinds[one.kind]),
      " ",
      html("b", {}, name(one)),
      " ",
      html("span", { class: "why" }, one.why),
    ),
  );
  const mark = () => {
    const now = state.now.selected.length ? state.now.selected : some[0]!.heads;
    for (const [i, button] of buttons.entries()) button.setAttribute("aria-pressed", String(some[i]!.heads.join() === now.join()));
  };
  mark();
  const element = html(
    "section",
    { class: "standouts", "aria-labelledby": title },
    html("h3", { id: title }, text.standouts),
    html("p", { class: "note" }, document.examples.length ? text.standoutsNote : text.standoutsBare),
    html("ol", {}, ...buttons.map((button) => html("li", {}, button))),
  );
  return { element, close: state.subscribe(mark, "selected") };
}
