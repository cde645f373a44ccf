// The card beside a map of heads: the numbers of the head under the pointer, or of the one picked last.
import { html, type Child } from "../draw/element";
import { doubts } from "../doubts";
import { FOLLOWS, unfocus } from "../draw/grid";
import { number } from "../draw/number";
import { picture } from "../draw/pixels";
import { thumbnail } from "../maps";
import { measure, measureKeys, roleName, written, type Measure } from "../measures";
import type { Page } from "../page";
import { title } from "./heads";

/** otherwise: the head that is shown before any is picked. */
export function card(page: Page, otherwise?: number): { element: HTMLElement; close: () => void } {
  const { document, state, words, colours } = page;
  const element = html("aside", { class: "card", "aria-label": words.aboutHead, ...FOLLOWS, onfocusout: (event: FocusEvent) => unfocus(page, event) });
  let open = false;

  function draw(): void {
    const head = state.now.hovered ?? state.now.selected.at(-1) ?? otherwise;
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
    const measures = measureKeys(document).map((key) => measure(document, key, words)).filter((one) => !one.kinds);
    const rows: Child[] = measures.flatMap((one) => {
      const title = one.group === group ? [] : [html("div", { class: "group" }, words.measureGroups[one.group])];
      group = one.group;
      const method = one.key.startsWith("importance:") ? one.key.slice("importance:".length) : "";
      const mean = one.mean[head];
      const share = mean === null || mean === undefined ? 0 : one.share(mean);
      const row = html(
        "div",
        { class: one.key === state.now.metric ? "row now" : "row", "data-row": one.key, title: one.tells },
        html("dt", {}, method ? (words.methods[method] ?? method) : one.name),
        html("dd", {}, html("span", { class: "value" }, written(one, head)), html("span", { class: "unit" }, one.unit ? ` ${one.unit}` : "")),
        html("dd", { "aria-hidden": "true" }, html("span", { class: "meter" }, html("i", { style: `width:${(100 * Math.max(0, Math.min(1, share))).toFixed(1)}%` }))),
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
      ...numbers(rows),
      meanings(page, measures, open, (now) => (open = now)),
    ];
  }

  /** Lists of names and values, each under the name of its group. */
  function numbers(rows: Child[]): Node[] {
    const lists: Node[] = [];
    for (const row of rows as HTMLElement[]) {
      if (row.className === "group") lists.push(row);
      else {
        if (!(lists.at(-1) instanceof HTMLDListElement)) lists.push(html("dl", { class: "numbers" }));
        lists.at(-1)!.appendChild(row);
      }
    }
    return lists;
  }

  draw();
  return { element, close: state.subscribe(draw, "hovered", "selected", "metric", "example") };
}

/** What every number means and what it is counted in, to be opened by pointer, finger or keyboard. */
export function meanings(page: Page, measures: readonly Measure[], open = false, toggled: (open: boolean) => void = () => {}): HTMLElement {
  const { words } = page;
  const about = (one: Measure) => html("div", {}, html("dt", {}, one.name, " ", html("span", { class: "unit" }, `(${one.unit || words.unitless})`)), html("dd", {}, one.tells));
  const details = html(
    "details",
    { class: "meanings", open, ontoggle: () => toggled(details.open) },
    html("summary", {}, words.whatIsThis),
    html("p", { class: "note" }, words.standardError),
    html("dl", {}, ...measures.map(about)),
  );
  return details;
}
