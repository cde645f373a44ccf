// The card beside a map of heads: the numbers of the head under the pointer, or of the one picked last.
import { html, type Child } from "../draw/element";
import { doubts } from "../doubts";
import { measured, number } from "../draw/number";
import { picture } from "../draw/pixels";
import { thumbnail } from "../maps";
import { measure, measureKeys, roleName } from "../measures";
import type { Page } from "../page";
import { title } from "./heads";

export function card(page: Page): { element: HTMLElement; close: () => void } {
  const { document, state, words, colours } = page;
  const element = html("aside", { class: "card", "aria-label": words.aboutHead });

  function draw(): void {
    const head = state.now.hovered ?? state.now.selected.at(-1);
    element.replaceChildren(...(head === undefined ? hint() : about(head)));
  }

  function hint(): Node[] {
    return [
      html("h2", {}, words.aboutHead),
      html("p", { class: "note" }, words.howTo),
      html(
        "dl",
        { class: "keys" },
        ...words.keys.flatMap(([key, does]) => [html("dt", {}, html("kbd", {}, key!)), html("dd", {}, does!)]),
      ),
    ];
  }

  function about(head: number): Node[] {
    const claimed = (document.roles?.heads[head] ?? []).filter((one) => one.claimed);
    const twin = document.redundancy?.twin[head] ?? -1;
    const map = thumbnail(document, document.examples[state.now.example], head);
    let group = "statistics";
    const rows: Child[] = measureKeys(document)
      .map((key) => measure(document, key, words))
      .filter((one) => !one.kinds)
      .flatMap((one) => {
        const title = one.group === group || one.group === "comparison" ? [] : [html("tr", { class: "group" }, html("th", { colspan: 3, scope: "colgroup" }, words.measureGroups[one.group]))];
        group = one.group;
        const method = one.key.startsWith("importance:") ? one.key.slice("importance:".length) : "";
        const mean = one.mean[head];
        const share = mean === null || mean === undefined ? 0 : one.share(mean);
        const row = html(
          "tr",
          { class: one.key === state.now.metric ? "now" : null, "data-row": one.key },
          html("th", { scope: "row" }, method ? (words.methods[method] ?? method) : one.name),
          html("td", { class: "value" }, measured(mean, one.se[head])),
          html("td", {}, html("span", { class: "meter", "aria-hidden": "true" }, html("i", { style: `width:${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%` }))),
        );
        return [...title, row];
      });
    return [
      html("h2", {}, title(document, head, words)),
      html("p", { class: "site" }, document.heads.site[head]),
      ...doubts(page, head),
      html(
        "div",
        { class: "face" },
        map && html("img", { alt: "", width: 108, height: 108, src: picture(map.weights.rows, map.weights.columns, map.weights.at, colours) }),
        html(
          "div",
          {},
          claimed.length ? html("p", { class: "tags" }, ...claimed.map((one) => html("span", { class: "tag" }, roleName(one.role, words)))) : html("p", { class: "note" }, words.noRole),
          twin >= 0 ? html("p", { class: "note" }, `${words.twin}: `, html("b", {}, document.heads.name[twin]), ` (${number(document.redundancy!.twin_distance[head])})`) : null,
          html("button", { type: "button", class: "go", "data-open": document.heads.name[head], onclick: () => page.open("head", head) }, words.openHead),
        ),
      ),
      html("table", { class: "numbers" }, html("tbody", {}, ...rows)),
    ];
  }

  draw();
  return { element, close: state.subscribe(draw, "hovered", "selected", "metric", "example") };
}
