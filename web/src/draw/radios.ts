// A row of small buttons of which one is chosen: one stop for the Tab key, arrows move within.
import { html } from "./element";

export interface Radios {
  element: HTMLElement;
  /** Chooses one, as a click does. */
  pick(index: number): void;
  /** Shows what is chosen now. */
  update(): void;
}

/** names: what stands on the buttons; now: which is chosen; chosen: called when a person chooses another. */
export function radios(label: string, names: readonly string[], now: () => number, chosen: (index: number) => void): Radios {
  const element = html("div", { class: "radios", role: "radiogroup", "aria-label": label });
  const buttons = names.map((name, index) =>
    html("button", { type: "button", role: "radio", onclick: () => pick(index) }, html("bdi", {}, name)),
  );
  element.append(...buttons);
  element.addEventListener("keydown", (event) => {
    const at = now();
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -at, End: names.length - 1 - at }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = (at + step + names.length) % names.length;
    pick(next);
    buttons[next]!.focus();
  });
  function pick(index: number): void {
    if (index !== now()) chosen(index);
    update();
  }
  function update(): void {
    for (const [index, button] of buttons.entries()) {
      button.setAttribute("aria-checked", String(index === now()));
      button.tabIndex = index === now() ? 0 : -1;
    }
  }
  update();
  return { element, pick, update };
}
