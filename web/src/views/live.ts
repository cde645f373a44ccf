// The live view: a text or picture, every head's map of it, what the model says, and what it says without some heads.
import { html } from "../draw/element";
import type { Attended, Heads, Live, Quality, Silenced } from "../live";
import type { Page } from "../page";
import { answers } from "./live/answers";
import { choices } from "./live/choices";
import { input } from "./live/input";
import { maps } from "./live/maps";
import { quality } from "./live/quality";
import { spare } from "./live/spare";

const PAUSE = 40; // milliseconds without a key after which a text is asked about

/** Part of the view: drawn once, then told when something changed. */
export interface Part {
  element: HTMLElement;
  update(): void;
  close?(): void;
}

/** What the parts of the view share. */
export interface Bench {
  page: Page;
  live: Live;
  /** what is wrong, or "" */
  error: string;
  /** milliseconds that the last answer took, or null while it is awaited */
  took: number | null;
  /** Asks about the input that is in `live.input` now, after a short pause in typing. */
  ask(pause?: number): void;
  /** Silences these heads instead of those before (indexes into the document). */
  silence(heads: readonly number[]): void;
}

export function live(root: HTMLElement, page: Page): () => void {
  const { live, state, words } = page as Page & { live: Live };
  const parts: Part[] = [];
  let timer: number | undefined;
  let asking: AbortController | undefined;

  const bench: Bench = { page, live, error: "", took: null, ask, silence };

  function ask(pause = PAUSE): void {
    window.clearTimeout(timer);
    asking?.abort();
    timer = window.setTimeout(() => void answered(), pause);
  }

  function silence(heads: readonly number[]): void {
    state.set({ silenced: [...heads].sort((a, b) => a - b) });
    ask(0);
  }

  /** Asks about the input, with the heads that are silenced, and shows what comes. */
  async function answered(): Promise<void> {
    const current = live.input;
    const heads = bySite(page, state.now.silenced);
    const some = Object.keys(heads).length > 0;
    if (!current || ("text" in current && !current.text.trim())) return;
    const mine = (asking = new AbortController());
    bench.took = null;
    update();
    const begun = performance.now();
    try {
      if (some) {
        live.without = await live.ask<Silenced>("/api/silence", { ...current, heads }, mine.signal);
        live.attended = { example: live.without.example, answer: live.without.before, cut: live.attended?.cut ?? null };
      } else {
        live.without = null;
        live.attended = await live.ask<Attended>("/api/attend", current, mine.signal);
      }
      bench.error = "";
      bench.took = Math.round(performance.now() - begun);
      page.showExample(live.attended.example);
      update();
      if (some) announce();
      if (live.progress.stages.length) {
        live.quality = await live.ask<Quality>("/api/quality", { heads }, mine.signal);
        remember(live);
        update();
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      bench.took = 0;
      bench.error = error instanceof TypeError ? words.live.lost : String(error instanceof Error ? error.message : error);
      update();
    }
  }

  function announce(): void {
    const first = live.without?.after?.items[0];
    if (first) page.announce(`${words.live.after(state.now.silenced.length)}: ${first[0]}`);
  }

  function update(): void {
    for (const part of parts) part.update();
  }

  const left = [input(bench), maps(bench)];
  const right = [answers(bench), choices(bench), quality(bench)];
  parts.push(...left, ...right, spare(bench));
  root.append(
    html("p", { class: "note lead" }, live.progress.reads === "text" ? words.live.lead : words.live.leadPicture),
    parts.at(-1)!.element,
    html(
      "div",
      { class: "live" },
      html("div", { class: "left" }, ...left.map((part) => part.element)),
      html("div", { class: "right" }, ...right.map((part) => part.element)),
    ),
  );
  update();
  if (live.attended) {
    bench.took = 0;
    page.showExample(live.attended.example);
    update();
    if (!live.quality && live.input) ask(0);
  }
  const end = live.subscribe(update);
  return () => {
    end();
    window.clearTimeout(timer);
    asking?.abort();
    for (const part of parts) part.close?.();
  };
}

/** Heads by their site and number, as the server names them. */
export function bySite(page: Page, heads: readonly number[]): Heads {
  const found: Heads = {};
  for (const head of heads) (found[page.document.heads.site[head]!] ??= []).push(page.document.heads.head[head]!);
  return found;
}

/** Indexes of heads that the server named. */
export function indexes(page: Page, heads: Heads): number[] {
  const { site, head } = page.document.heads;
  return site.flatMap((name, index) => (heads[name]?.includes(head[index]!) ? [index] : []));
}

function remember(live: Live): void {
  const { quality } = live;
  if (!quality || quality.value === null) return;
  const point = { kept: quality.kept, value: quality.value };
  if (!live.tried.some((one) => one.kept === point.kept && one.value === point.value)) live.tried.push(point);
}
