// The live view: a text or picture, every head's map of it, what the model says, and what it says without some heads.
import type { Example, SiteHeads } from "../document";
import { html } from "../draw/element";
import type { Live } from "../live";
import type { Page } from "../page";
import { answers } from "./live/answers";
import { choices } from "./live/choices";
import { input } from "./live/input";
import { maps } from "./live/maps";
import { quality } from "./live/quality";
import { spare } from "./live/spare";

const PAUSE = 120; // milliseconds after an answer in which nobody asks: then there is time to measure

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
  /** Asks about the input that is in `live.input` now, instead of what was asked before. */
  ask(): void;
  /** Silences these heads instead of those before (indexes into the document). */
  silence(heads: readonly number[]): void;
}

export function live(root: HTMLElement, page: Page): () => void {
  const { live, state, words } = page as Page & { live: Live };
  const parts: Part[] = [];
  let asking: AbortController | undefined;

  const bench: Bench = { page, live, error: "", took: 0, ask, silence };

  function ask(): void {
    asking?.abort();
    void answered();
  }

  function silence(heads: readonly number[]): void {
    state.set({ silenced: [...heads].sort((a, b) => a - b) });
    ask();
  }

  /** Asks about the input, with the heads that are silenced, and shows what comes; then how good the model still is. */
  async function answered(about = true): Promise<void> {
    const mine = (asking = new AbortController());
    const heads = bySite(page, state.now.silenced);
    try {
      if (about) await compared(heads, mine.signal);
      if (live.progress.stages.length && live.measured !== JSON.stringify(heads)) {
        await new Promise((done) => setTimeout(done, PAUSE));
        if (mine.signal.aborted) return;
        live.quality = await live.ask("/api/quality", { heads }, mine.signal);
        live.measured = JSON.stringify(heads);
        remember(live);
        update();
      }
    } catch (error) {
      if (mine.signal.aborted) return;
      bench.took = 0;
      bench.error = error instanceof TypeError ? words.live.lost : words.said(String(error instanceof Error ? error.message : error));
      update();
    }
  }

  async function compared(heads: SiteHeads, signal: AbortSignal): Promise<void> {
    const current = live.input;
    if (!current || ("text" in current && !current.text.trim())) return;
    bench.took = null;
    update();
    const begun = performance.now();
    if (Object.keys(heads).length) {
      const found = await live.ask("/api/silence", { ...current, heads }, signal);
      live.without = found;
      live.attended = { example: found.example, answer: found.before, cut: found.cut };
    } else {
      live.attended = await live.ask("/api/attend", current, signal);
      live.without = null;
    }
    const example: Example = live.attended.example;
    example.request = { input: current, heads };
    bench.error = "";
    bench.took = Math.round(performance.now() - begun);
    page.showExample(example);
    update();
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
  void answered(false);
  const end = live.subscribe(update);
  return () => {
    end();
    asking?.abort();
    for (const part of parts) part.close?.();
  };
}

/** Heads by their site and number, as the server names them. */
export function bySite(page: Page, heads: readonly number[]): SiteHeads {
  const found: SiteHeads = {};
  for (const head of heads) (found[page.document.heads.site[head]!] ??= []).push(page.document.heads.head[head]!);
  return found;
}

/** Indexes of heads that the server named. */
export function indexes(page: Page, heads: SiteHeads): number[] {
  const { site, head } = page.document.heads;
  return site.flatMap((name, index) => (heads[name]?.includes(head[index]!) ? [index] : []));
}

function remember(live: Live): void {
  const { quality } = live;
  if (!quality || quality.value === null) return;
  const point = { kept: quality.kept, value: quality.value, se: quality.se };
  if (!live.tried.some((one) => one.kept === point.kept && one.value === point.value)) live.tried.push(point);
}
