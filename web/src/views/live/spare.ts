// What is measured in spare time, as long as it is.
import { html } from "../../draw/element";
import type { Bench, Part } from "../live";

export function spare({ page, live }: Bench): Part {
  const { words } = page;
  const says = html("span", {});
  const bar = html("progress", { max: 1, value: 0, "aria-label": "" });
  const element = html("div", { class: "spare", "data-part": "spare" }, bar, says);
  return {
    element,
    update() {
      const { finished, stage, stages, done, share } = live.progress;
      element.hidden = finished || !stages.length;
      const text = words.live.measuring(words.live.stages[stage] ?? stage, done + 1, stages.length);
      says.textContent = text;
      bar.setAttribute("aria-label", text);
      bar.value = (done + share) / Math.max(1, stages.length);
    },
  };
}
