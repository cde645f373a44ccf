// Requests of the live page, and its beginning: the page opens with what is known of the model, which grows meanwhile.
import { check, type Answer, type Example, type HeadDocument } from "./document";
import { html } from "./draw/element";
import type { Shown } from "./page";
import { languages } from "./words";

/** Heads by their site, as the server names them. */
export type Heads = Record<string, number[]>;

export type Input = { text: string } | { image: string };

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
  value: number | null;
  kept: number;
}

/** What the live view keeps while other views are open. */
export interface Live {
  progress: Progress;
  /** the input that was asked about last, and what came of it */
  input: Input | null;
  attended: Attended | null;
  without: Silenced | null;
  quality: Quality | null;
  /** sets of heads that were tried: share kept and quality */
  tried: { kept: number; value: number }[];
  /** the ranking that was chosen last, and the share that it silenced, in percent */
  choice: { ranking: string; percent: number };
  /** Asks the server; an error is a sentence for people. */
  ask<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T>;
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
  const tab = crypto.getRandomValues(new Uint32Array(4)).join("-");
  const listeners = new Set<() => void>();

  async function request(path: string, body?: unknown, signal?: AbortSignal): Promise<Response> {
    const answer = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers: { "x-manyheads-token": token, "x-manyheads-tab": tab, ...(body === undefined ? {} : { "content-type": "application/json" }) },
      ...(body === undefined ? {} : { body: JSON.stringify(body) }),
      ...(signal ? { signal } : {}),
      cache: "no-store",
    });
    if (!answer.ok) throw new Error(await sentence(answer));
    return answer;
  }

  const get = async <T>(path: string) => (await (await request(path)).json()) as T;
  const [progress, first] = await Promise.all([get<Progress>("/api/progress"), get<HeadDocument>("/api/document")]);
  const document = check(first);
  const example = document.examples[0];
  const live: Live = {
    progress,
    input: progress.reads === "text" && progress.samples[0] ? { text: progress.samples[0] } : null,
    attended: example ? { example, answer: example.answer ?? null, cut: null } : null,
    without: null,
    quality: null,
    tried: [],
    choice: { ranking: progress.rankings[0] ?? "", percent: 0 },
    ask: async <T>(path: string, body: unknown, signal?: AbortSignal) => (await (await request(path, body, signal)).json()) as T,
    file: async (path, body) => (await request(path, body)).blob(),
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
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
