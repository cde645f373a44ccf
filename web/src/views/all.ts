// All heads at once: who is like whom, what changes with depth, and how many could go.
import { html } from "../draw/element";
import type { Page } from "../page";
import { depth } from "./all/depth";
import { pruning } from "./all/pruning";
import { similarity } from "./all/similarity";
import { space } from "./all/space";

export function all(root: HTMLElement, page: Page): () => void {
  const charts = [space, similarity, depth, pruning].map((draw) => ({ wide: draw === depth || draw === pruning, shown: draw(page) }));
  const grid = html("div", { class: "all-heads" });
  for (const { wide, shown } of charts) {
    if (!shown) continue;
    if (wide) shown.figure.classList.add("wide");
    grid.append(shown.figure);
  }
  if (!grid.childElementCount) root.append(html("p", { class: "note" }, page.words.all.nothing));
  else root.append(grid);
  return () => {
    for (const { shown } of charts) shown?.close();
  };
}
