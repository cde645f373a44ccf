// The address says which view and which head is open (#head/3.5), so that a link or a bookmark leads there.
import type { Page } from "./page";

/** Opens what the address says, and keeps the address at what is open; returns what ends it. */
export function followAddress(page: Page, views: () => string[]): () => void {
  const { state, document } = page;

  function read(): void {
    let parts: string[];
    try {
      parts = decodeURIComponent(location.hash.slice(1)).split("/");
    } catch {
      return; // an address that somebody mistyped
    }
    const [view = "", name] = parts;
    const head = document.heads.name.indexOf(name ?? "");
    if (head >= 0) state.set({ selected: [head] });
    if (views().includes(view)) state.set({ view });
  }

  function write(): void {
    const { view, selected } = state.now;
    const name = document.heads.name[selected.at(-1) ?? -1];
    const hash = `#${[view, ...(name === undefined ? [] : [name])].map(encodeURIComponent).join("/")}`;
    try {
      if (hash !== location.hash) history.replaceState(history.state, "", hash);
    } catch {
      // a frame may forbid it; then the address says nothing
    }
  }

  read();
  addEventListener("hashchange", read);
  const end = state.subscribe(write, "view", "selected");
  return () => {
    end();
    removeEventListener("hashchange", read);
  };
}
