// The list of example inputs, for views that show one of them.
import type { Page } from "../page";
import { html } from "./element";
import { shorten, visible } from "./tokens";

/** Its title; pictures have none unless somebody gave them one. */
function named(page: Page, index: number): string {
  const { title, label, kind } = page.document.examples[index]!;
  const name = shorten(visible(title), 70) || (kind === "image" ? page.words.pictureNumber : page.words.inputNumber)(index + 1);
  return label ? `${name} · ${page.words.label(shorten(visible(label), 40))}` : name;
}

/** A drop-down list of those examples; choosing one changes the state. */
export function exampleChoice(page: Page, indexes: readonly number[], now: number): HTMLElement {
  const select = html("select", {
    "aria-label": page.words.example,
    "data-choice": "example",
    onchange: () => page.state.set({ example: Number(select.value) }),
  });
  for (const index of indexes)
    select.append(html("option", { value: index, selected: index === now }, named(page, index)));
  return html("label", { class: "choice" }, html("span", { class: "label" }, page.words.example), select);
}
