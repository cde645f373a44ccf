// The page: header, tabs, and the open view. Report, widget and live page all call show().
import { followAddress } from "./address";
import type { Example, HeadDocument } from "./document";
import { unverifiedCount } from "./doubts";
import { dark, light, type Colours } from "./draw/colour";
import { html, unique } from "./draw/element";
import { whole } from "./draw/number";
import { tip, type Tip } from "./draw/tip";
import type { Live } from "./live";
import { current, store, type Store } from "./state";
import { tabs } from "./views";
import { languages, type Words } from "./words";

/** What a view is given. It is made anew, and the view drawn anew, when language or theme change. */
export interface Page {
  document: HeadDocument;
  state: Store;
  words: Words;
  colours: Colours;
  tip: Tip;
  live?: Live;
  /** Opens a view, and shows a head there. */
  open(view: string, head?: number): void;
  /** Says something to screen readers. */
  announce(text: string): void;
  /** Puts an example last, in the place of the one put there before, and shows it; the live view shows it by itself. */
  showExample(example: Example): void;
  /** Draws the open view again (the document changed). */
  redraw(): void;
}

export interface ShowOptions {
  live?: Live;
  language?: string;
  theme?: Theme;
  /** keep language and theme for the next visit, and the open head in the address */
  remember?: boolean;
}

export type Theme = "auto" | "light" | "dark";

export interface Shown {
  state: Store;
  page: Page;
  /** Draws anew what the document says (it changed); the live view hears of it by itself. */
  renew(): void;
  close(): void;
}

/** Draws a document into root. */
export function show(root: HTMLElement, document: HeadDocument, options: ShowOptions = {}): Shown {
  const memory = options.remember ? remembered() : new Map<string, string>();
  let language = options.language ?? memory.get("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en");
  if (!(language in languages)) language = "en";
  let theme = (options.theme ?? memory.get("theme") ?? "auto") as Theme;

  const metrics = Object.keys(document.heads.metrics);
  const state = store({
    view: options.live ? "live" : "heads",
    metric: metrics.includes("entropy") ? "entropy" : (metrics[0] ?? "role"),
    selected: [],
    hovered: null,
    example: 0,
    silenced: [],
    filter: "",
    sort: "place",
  });

  root.classList.add("manyheads");
  const announcer = html("div", { class: "unseen", role: "status", "aria-live": "polite" });
  const stage = html("div", { class: "stage" });
  root.replaceChildren(stage, announcer);
  const card = tip(root);

  const night = matchMedia("(prefers-color-scheme: dark)");
  const paper = matchMedia("print");
  const isDark = () => !paper.matches && (theme === "dark" || (theme === "auto" && night.matches));

  let guest = -1; // where showExample puts its example
  const page: Page = {
    document,
    state,
    words: languages[language]!,
    colours: light,
    tip: card,
    ...(options.live ? { live: options.live } : {}),
    open(view, head) {
      if (head !== undefined) state.set({ selected: [head] });
      state.set({ view });
      stage.querySelector<HTMLElement>("[role=tab][aria-selected=true]")?.focus();
    },
    announce(text) {
      announcer.textContent = text;
    },
    showExample(example) {
      if (guest < 0) guest = document.examples.length;
      document.examples[guest] = example;
      state.set({ example: guest });
      if (state.now.view !== "live") page.redraw();
    },
    redraw: () => drawView(),
  };

  let leave: (() => void) | void;
  let panel: HTMLElement;
  const heading = html("h2", { class: "unseen" });

  function drawView(): void {
    leave?.();
    card.hide();
    panel.replaceChildren();
    const tab = tabs.find((one) => one.name === state.now.view) ?? tabs[1]!;
    panel.setAttribute("aria-labelledby", `${ids}-${tab.name}`);
    panel.dataset["view"] = tab.name;
    heading.textContent = page.words.tabs[tab.name];
    leave = tab.view(panel, page);
  }

  const ids = unique("tab");

  function drawAll(): void {
    const words = languages[language]!;
    page.words = words;
    page.colours = isDark() ? dark : light;
    root.lang = words.tag;
    root.dataset["theme"] = isDark() ? "dark" : "light";
    const focused = root.contains(window.document.activeElement) ? window.document.activeElement?.id : "";
    leave?.();
    leave = undefined;
    panel = html("div", { class: "panel", id: `${ids}-panel`, role: "tabpanel", tabindex: "-1" });
    stage.replaceChildren(header(), bar(), heading, panel, footer());
    drawView();
    if (focused) window.document.getElementById(focused)?.focus();
  }

  function header(): HTMLElement {
    const { words } = page;
    const { header: about, heads, stacks } = document;
    const doubtful = unverifiedCount(document);
    const layers = stacks.reduce((sum, stack) => sum + stack.layers.length, 0);
    return html(
      "div",
      { class: "top" },
      html(
        "div",
        { class: "who" },
        html("h1", {}, html("bdi", {}, about.model || words.someModel)),
        html(
          "p",
          {},
          words.summary(layers, heads.name.length, whole(about.units), words.units[about.unit] ?? about.unit, words.said(about.corpus)),
        ),
        doubtful ? html("p", { class: "doubt", "data-part": "unverified" }, words.unverifiedHeads(doubtful, heads.name.length)) : null,
      ),
      html(
        "div",
        { class: "switches" },
        choice("theme", words.theme, ["auto", "light", "dark"].map((name) => [name, words.themes[name as Theme]]), theme, (value) => {
          theme = value as Theme;
          keep("theme", value);
        }),
        choice("language", words.languageLabel, Object.entries(languages).map(([name, one]) => [name, one.language]), language, (value) => {
          language = value;
          keep("language", value);
        }),
      ),
    );
  }

  function choice(name: string, label: string, values: [string, string][], now: string, pick: (value: string) => void) {
    const select = html("select", {
      id: `${ids}-${name}`,
      "aria-label": label,
      "data-switch": name,
      onchange: () => {
        pick(select.value);
        drawAll();
      },
    });
    for (const [value, text] of values) select.append(html("option", { value, selected: value === now }, text));
    return select;
  }

  function bar(): HTMLElement {
    const list = html("div", { class: "tabs", role: "tablist", "aria-label": page.words.views });
    const open = tabs.filter((tab) => tab.has(page));
    for (const tab of open) {
      const chosen = tab.name === state.now.view;
      list.append(
        html(
          "button",
          {
            type: "button",
            role: "tab",
            id: `${ids}-${tab.name}`,
            "data-tab": tab.name,
            "aria-controls": `${ids}-panel`,
            "aria-selected": String(chosen),
            tabindex: chosen ? "0" : "-1",
            onclick: () => state.set({ view: tab.name }),
          },
          page.words.tabs[tab.name],
        ),
      );
    }
    list.addEventListener("keydown", (event) => {
      const at = open.findIndex((tab) => tab.name === state.now.view);
      const step = { ArrowRight: 1, ArrowLeft: -1, Home: -at, End: open.length - 1 - at }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      page.open(open[(at + step + open.length) % open.length]!.name);
    });
    return list;
  }

  function footer(): HTMLElement {
    const { header: about } = document;
    return html(
      "div",
      { class: "bottom" },
      html("p", {}, `manyheads ${about.manyheads} · `, page.words.fingerprint, " ", html("code", {}, about.fingerprint.slice(0, 16))),
      about.notes.length ? html("ul", {}, ...about.notes.map((note) => html("li", {}, page.words.said(note)))) : null,
    );
  }

  function keep(name: string, value: string): void {
    if (options.remember) remember(name, value);
  }

  const ends = [
    state.subscribe(() => {
      for (const button of stage.querySelectorAll<HTMLElement>("[role=tab]")) {
        const chosen = button.dataset["tab"] === state.now.view;
        button.setAttribute("aria-selected", String(chosen));
        button.tabIndex = chosen ? 0 : -1;
      }
      drawView();
    }, "view"),
    state.subscribe(() => {
      if (state.now.selected.length) page.announce(page.words.selected(document.heads.name[current(state.now)] ?? ""));
    }, "selected"),
  ];
  for (const query of [night, paper]) {
    const again = () => {
      if ((root.dataset["theme"] === "dark") !== isDark()) drawAll();
    };
    query.addEventListener("change", again);
    ends.push(() => query.removeEventListener("change", again));
  }
  drawAll();
  if (options.remember) ends.push(followAddress(page, () => tabs.filter((tab) => tab.has(page)).map((tab) => tab.name)));
  return {
    state,
    page,
    renew() {
      const focused = root.contains(window.document.activeElement) ? window.document.activeElement?.id : "";
      // the panel stays in its place: who types there goes on
      stage.querySelector(".top")!.replaceWith(header());
      stage.querySelector(".tabs")!.replaceWith(bar());
      stage.querySelector(".bottom")!.replaceWith(footer());
      if (state.now.view !== "live") drawView();
      if (focused) window.document.getElementById(focused)?.focus();
    },
    close() {
      leave?.();
      for (const end of ends) end();
      root.replaceChildren();
    },
  };
}

function remembered(): Map<string, string> {
  try {
    return new Map(["language", "theme"].flatMap((name) => {
      const value = localStorage.getItem(`manyheads.${name}`);
      return value ? [[name, value] as const] : [];
    }));
  } catch {
    return new Map(); // storage may be forbidden, for instance in a frame
  }
}

function remember(name: string, value: string): void {
  try {
    localStorage.setItem(`manyheads.${name}`, value);
  } catch {
    // then it is forgotten
  }
}
