// The small card beside the pointer (or beside the focused element) with the numbers of what it points at.
import { html, type Child } from "./element";

export interface Tip {
  show(at: { clientX: number; clientY: number } | Element, ...content: Child[]): void;
  hide(): void;
}

/** One tip for a whole page; screen readers hear the same from labels, so it is hidden from them. */
export function tip(root: HTMLElement): Tip {
  const card = html("div", { class: "tip", "aria-hidden": "true" });
  card.hidden = true;
  root.append(card);
  return {
    show(at, ...content) {
      card.replaceChildren();
      for (const child of content) if (child !== null && child !== undefined && child !== false) card.append(child instanceof Node ? child : String(child));
      card.hidden = false;
      const box = at instanceof Element ? at.getBoundingClientRect() : null;
      const x = box ? box.right : (at as { clientX: number }).clientX;
      const y = box ? box.top : (at as { clientY: number }).clientY;
      const size = card.getBoundingClientRect();
      const left = x + 14 + size.width > innerWidth ? (box ? box.left : x) - 14 - size.width : x + 14;
      card.style.left = `${Math.max(4, left)}px`;
      card.style.top = `${Math.max(4, Math.min(y + 10, innerHeight - size.height - 6))}px`;
    },
    hide() {
      card.hidden = true;
    },
  };
}
