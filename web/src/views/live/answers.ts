// What the model says with all heads, and beside it what it says without some of them.
import type { Answer, Item } from "../../document";
import { html } from "../../draw/element";
import { number, percent } from "../../draw/number";
import { shorten, visible } from "../../draw/tokens";
import type { Bench, Part } from "../live";

export function answers(bench: Bench): Part {
  const { live, page } = bench;
  const words = page.words.live;
  const title = html("h3", {});
  const body = html("div", { class: "answers", "aria-live": "polite" });
  const change = html("p", { class: "note" });
  const element = html("section", { class: "chart says", "data-part": "answers" }, title, body, change);
  return {
    element,
    update() {
      const before = live.attended?.answer ?? null;
      const after = live.without?.after ?? null;
      const kind = before?.kind ?? "";
      title.textContent = kind ? `${words.says}: ${words.kinds[kind] ?? kind}` : words.says;
      body.classList.toggle("stale", bench.took === null);
      if (!before) {
        body.replaceChildren(html("p", { class: "note" }, words.nothing));
      } else {
        const count = page.state.now.silenced.length;
        body.replaceChildren(
          column(words.before, before, null, "before"),
          after ? column(words.after(count), after, before, "after") : html("p", { class: "note empty" }, words.afterNone),
        );
      }
      const moved = live.without?.change ?? null;
      const same = !!before && !!after && JSON.stringify(before.items) === JSON.stringify(after.items);
      change.textContent = live.without ? (same ? words.same : "") + (moved === null ? "" : ` ${words.change[live.without.measure]?.(number(moved)) ?? ""}`) : "";
    },
  };

  function column(heading: string, answer: Answer, other: Answer | null, which: string): HTMLElement {
    return html(
      "div",
      { class: "said", "data-which": which },
      html("h4", {}, heading),
      answer.kind === "translation" ? html("p", { class: "translation", dir: "auto" }, ...differences(answer, other)) : list(answer, other),
    );
  }

  function list(answer: Answer, other: Answer | null): HTMLElement {
    const most = Math.max(...answer.items.map(([, value]) => value), ...(other?.items ?? []).map(([, value]) => value), 1e-9);
    return html("ol", {}, ...answer.items.map((item, place) => line(item, place, other, answer.kind, answer.kind === "neighbours" ? 1 : Math.min(1, most))));
  }

  function line([text, value]: Item, place: number, other: Answer | null, kind: string, most: number): HTMLElement {
    const was = other?.items.findIndex(([one]) => one === text) ?? place;
    const moved = !other ? "" : was < 0 ? "new" : was > place ? "up" : was < place ? "down" : "";
    const share = Math.max(0, Math.min(1, value / most));
    return html(
      "li",
      { class: moved && `moved-${moved}`, "data-text": text, "data-value": value },
      html("span", { class: "what", title: text }, html("bdi", {}, shorten(visible(text), 110))),
      html("span", { class: "worth" }, moved ? html("span", { class: "move", "aria-hidden": "true" }, { new: "+", up: "↑", down: "↓" }[moved]) : null, kind === "neighbours" ? number(value, 2) : kind === "amount" ? number(value) : percent(value)),
      html("span", { class: "bar", "aria-hidden": "true" }, html("i", { style: `width:${(100 * share).toFixed(1)}%` })),
    );
  }
}

/** The words of a translation; those that the other one lacks are marked. */
function differences(answer: Answer, other: Answer | null): Node[] {
  const own = visible(answer.items[0]?.[0] ?? "").split(" ");
  if (!other) return [document.createTextNode(own.join(" "))];
  const before = visible(other.items[0]?.[0] ?? "").split(" ");
  const kept = common(before, own);
  return own.flatMap((word, i) => [kept.has(i) ? document.createTextNode(word) : html("mark", {}, word), document.createTextNode(" ")]);
}

/** Which places of b belong to the longest sequence of words that a and b have in common. */
function common(a: string[], b: string[]): Set<number> {
  const best = Array.from({ length: a.length + 1 }, () => new Uint16Array(b.length + 1));
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--) best[i]![j] = a[i] === b[j] ? best[i + 1]![j + 1]! + 1 : Math.max(best[i + 1]![j]!, best[i]![j + 1]!);
  const found = new Set<number>();
  for (let i = 0, j = 0; i < a.length && j < b.length; ) {
    if (a[i] === b[j]) {
      found.add(j);
      i++;
      j++;
    } else if (best[i + 1]![j]! >= best[i]![j + 1]!) i++;
    else j++;
  }
  return found;
}
