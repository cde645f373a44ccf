// Requests of the live page, and its beginning: the page opens with what is known of the model, which grows meanwhile.
import { check, type Answer, type Example, type HeadDocument, type Packed, type PipelineStep } from "./document";
import { html } from "./draw/element";
import type { Shown } from "./page";
import { languages } from "./words";

/** Heads by their site, as the server names them. */
export type Heads = Record<string, number[]>;

export type Input = { text: string } | { image: string } | { sample: number };

export interface Progress {
  version: number;
  stage: string;
  share: number;
  done: number;
  stages: string[];
  finished: boolean;
  reads: "text" | "image";
  mask: string;
  samples: string[];
  /** how many pictures there are to try */
  pictures: number;
  rules: string[];
  rankings: string[];
  /** the command that takes the plan */
  command: string;
}

export interface Attended {
  example: Example;
  answer: Answer | null;
  cut: { tokens: number; shown: number } | null;
}

export interface Silenced {
  before: Answer | null;
  after: Answer | null;
  change: number | null;
  measure: string;
  cut: Attended["cut"];
  example: Example;
}

export interface Quality {
  metric: string;
  before: number;
  before_se: number | null;
  value: number | null;
  /** standard error of the change from before */
  se: number | null;
  /** whether these sequences cannot tell the change from none */
  within_noise: boolean;
  sequences: number;
  kept: number;
}

/** What the live view keeps while other views are open. */
export interface Live {
  progress: Progress;
  /** what is in the field now */
  input: Input | null;
  /** what the heads attend to, and what the model says */
  attended: Attended | null;
  without: Silenced | null;
  quality: Quality | null;
  /** the heads that were silenced when quality was measured, as JSON */
  measured: string;
  /** sets of heads that were tried: share kept and quality */
  tried: { kept: number; value: number; se: number | null }[];
  /** the ranking that was chosen last, and the share that it silenced, in percent */
  choice: { ranking: string; percent: number };
  /** Asks the server; an error is a sentence for people. */
  ask<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T>;
  /** Fetches the exact attention of a head into an example that came from the server; false if it is there or cannot be had. */
  exact(document: HeadDocument, example: Example, head: number): Promise<boolean>;
  /** Fetches the exact attention of one query in every head into such an example; false as above. */
  rows(example: Example, query: number): Promise<boolean>;
  /** Fetches the steps of an input into such an example; false as above. */
  pipeline(example: Example): Promise<boolean>;
  /** The bytes of a file that the server makes. */
  file(path: string, body: unknown): Promise<Blob>;
  /** Calls back when the document or the progress has changed; returns what ends it. */
  subscribe(listener: () => void): () => void;
}

export type ShowLive = (root: HTMLElement, document: HeadDocument, live: Live) => Shown;

const SOON = 700; // milliseconds between two looks at the progress

/** Opens the live page; `show` draws it. */
export async function startLive(root: HTMLElement, carried: string, show: ShowLive): Promise<void> {
  const words = languages[navigator.language.startsWith("zh") ? "zh" : "en"]!.live;
  root.replaceChildren(html("p", { class: "opening", role: "status" }, words.opening));
  const token = carried || secret();
  const listeners = new Set<() => void>();
  let looking: { what: string; example: Example; stop: AbortController } | null = null;

  async function request(path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
    const answer = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers: { "x-manyheads-token": token, ...(body === undefined ? {} : { "content-type": "application/json" }) },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
      ...(signal ? { signal } : {}),
      cache: "no-store",
    });
    if (!answer.ok) throw new Error(await sentence(answer));
    return answer;
  }

  const get = async <T>(path: string) => (await (await request(path)).json()) as T;
  const { progress, document: first } = carriedFirst() ?? {
    progress: await get<Progress>("/api/progress"),
    document: await get<HeadDocument>("/api/document"),
  };
  const document = check(first);
  const example = document.examples[0];
  const input = progress.samples[0] ? { text: progress.samples[0] } : progress.pictures ? { sample: 0 } : null;
  if (example && input) example.asked = { input, heads: {} };
  const live: Live = {
    progress,
    input,
    attended: example ? { example, answer: example.answer ?? null, cut: null } : null,
    without: null,
    quality: null,
    measured: "",
    tried: [],
    choice: { ranking: progress.rankings[0] ?? "", percent: 0 },
    ask: async <T>(path: string, body: unknown, signal?: AbortSignal) => (await (await request(path, body, signal)).json()) as T,
    async exact(known, shown, head) {
      const [site, number] = [known.heads.site[head]!, known.heads.head[head]!];
      const maps = shown.maps.find((one) => one.site === site);
      if (!maps || maps.exact[number]) return false;
      const found = await look<{ exact: Packed }>(shown, "/api/exact", { site, head: number });
      if (found) maps.exact[number] = found.exact;
      return !!found;
    },
    async pipeline(shown) {
      const found = shown.pipeline ? null : await look<{ pipeline: PipelineStep[] | null }>(shown, "/api/pipeline", {});
      if (found) shown.pipeline = found.pipeline;
      return !!found?.pipeline;
    },
    async rows(shown, query) {
      if (shown.rows?.[query]) return false;
      const found = await look<{ rows: Record<string, Packed> }>(shown, "/api/rows", { query });
      if (found) (shown.rows ??= {})[query] = found.rows;
      return !!found;
    },
    file: async (path, body) => (await request(path, body)).blob(),
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
  /** Asks for more about an example, instead of what was looked for before; null if that is on its way, or nobody asked. */
  async function look<T>(example: Example, path: string, more: object): Promise<T | null> {
    const what = path + JSON.stringify(more);
    if (!example.asked || (looking?.example === example && looking.what === what)) return null;
    looking?.stop.abort();
    const mine = (looking = { what, example, stop: new AbortController() });
    try {
      return await live.ask<T>(path, { ...example.asked.input, heads: example.asked.heads, ...more }, mine.stop.signal);
    } finally {
      if (looking === mine) looking = null;
    }
  }

  const shown = show(root, document, live);

  // what takes longer arrives while the page is open
  let version = progress.version;
  while (!live.progress.finished) {
    await new Promise((done) => setTimeout(done, SOON));
    if (window.document.hidden) continue;
    try {
      live.progress = await get<Progress>("/api/progress");
      if (live.progress.version !== version) {
        const next = check(await get<HeadDocument>("/api/document"));
        if (next.examples[0] && input) next.examples[0].asked = { input, heads: {} };
        version = live.progress.version;
        const guests = document.examples.slice(next.examples.length);
        Object.assign(document, next, { examples: [...next.examples, ...guests] });
        shown.renew();
      }
    } catch {
      continue; // the server may be busy, or back in a moment; what a person asks says what is wrong
    }
    for (const listener of [...listeners]) listener();
  }
}

/** What the page carries, so that nothing has to be asked for before something is seen; null if it carries nothing. */
function carriedFirst(): { progress: Progress; document: HeadDocument } | null {
  const text = window.document.getElementById("first")?.textContent;
  return text ? (JSON.parse(text) as { progress: Progress; document: HeadDocument }) : null;
}

/** The token that came with the address, after #. It is kept for this tab, and the address is cleared of it. */
function secret(): string {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!given) return sessionStorage.getItem("manyheads.token") ?? "";
  sessionStorage.setItem("manyheads.token", given);
  history.replaceState(null, "", location.pathname);
  return given;
}

async function sentence(answer: Response): Promise<string> {
  try {
    const { error } = (await answer.json()) as { error?: unknown };
    if (typeof error === "string") return error;
  } catch {
    // no JSON: then the status has to do
  }
  return `${answer.status} ${answer.statusText}`;
}
