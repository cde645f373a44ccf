import { html } from "../draw/element";
import type { Page } from "../page";

export function live(root: HTMLElement, page: Page): void {
  root.append(html("p", { class: "note" }, page.words.tabs.live));
}
