// Requests of the live page, and its start: the page opens with what was measured so far, and grows while it is open.
import { check, type Ablation, type Attended, type Endpoints, type Example, type FirstPage, type HeadDocument, type HeadsRequest, type Input, type LiveProgress, type Quality } from "./document";
import { html } from "./draw/element";
import type { Shown } from "./page";
import { languages } from "./words";

/** What the live view keeps while other views are open. */
export interface Live {
  progress: LiveProgress;
  /** what is in the field now */
  input: Input | null;
  /** what the heads attend to, and what the model says */
  attended: Attended | null;
  without: Ablation | null;
  quality: Quality | null;
  /** the heads that were silenced when quality was measured, as JSON */
  measured: string;
  /** sets of heads that were tried: share kept and quality */
  tried: { kept: number; value: number; se: number | null }[];
  /** the ranking that was chosen last, and the share that it silenced, in percent */
  choice: { ranking: string; percent: number };
  /** Posts a request; an error is a sentence for people. */
  ask<P extends keyof Endpoints>(path: P, body: Endpoints[P]["takes"], signal?: AbortSignal): Promise<Endpoints[P]["gives"]>;
  /** Fetches the exact attention of a head into an example that came from the server; false if it is there or cannot be had. */
  exact(document: HeadDocument, example: Example, head: number): Promise<boolean>;
  /** Fetches the exact attention of one query in every head into such an example; false as above. */
  rows(example: Example, query: number): Promise<boolean>;
  /** Fetches the steps of an input into such an example; false as above. */
  pipeline(example: Example, site?: string): Promise<boolean>;
  /** The plan that removes these heads, as a file. */
  plan(body: HeadsRequest): Promise<Blob>;
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
  let fetching: { what: string; example: Example; stop: AbortController } | null = null;

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
    progress: await get<LiveProgress>("/api/progress"),
    document: await get<HeadDocument>("/api/document"),
  };
  const document = check(first);
  const example = document.examples[0];
  const input = progress.samples[0] ? { text: progress.samples[0] } : progress.pictures ? { sample: 0 } : null;
  if (example && input) example.request = { input, heads: {} };
  const live: Live = {
    progress,
    input,
    attended: example ? { example, answer: example.answer ?? null, cut: null } : null,
    without: null,
    quality: null,
    measured: "",
    tried: [],
    choice: { ranking: progress.rankings[0] ?? "", percent: 0 },
    ask: async <P extends keyof Endpoints>(path: P, body: Endpoints[P]["takes"], signal?: AbortSignal) =>
      (await (await request(path, body, signal)).json()) as Endpoints[P]["gives"],
    async exact(known, shown, head) {
      const [site, number] = [known.heads.site[head]!, known.heads.head[head]!];
      const maps = shown.maps.find((one) => one.site === site);
      if (!maps || maps.exact[number]) return false;
      const found = await fetchMore(shown, "/api/exact", { site, head: number });
      if (found) maps.exact[number] = found.exact;
      return !!found;
    },
    async pipeline(shown, site) {
      const there = shown.pipeline && (!site || shown.pipeline.some((step) => step.site === site));
      const found = there ? null : await fetchMore(shown, "/api/pipeline", site ? { site } : {});
      if (found) shown.pipeline = found.pipeline ?? shown.pipeline;
      return !!found?.pipeline;
    },
    async rows(shown, query) {
      if (shown.rows?.[query]) return false;
      const found = await fetchMore(shown, "/api/rows", { query });
      if (found) (shown.rows ??= {})[query] = found.rows;
      return !!found;
    },
    plan: async (body) => (await request("/api/plan", body)).blob(),
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
  /** Fetches more about an example, instead of what was fetched before; null if that is on its way, or the example came without a request. */
  async function fetchMore<P extends "/api/exact" | "/api/pipeline" | "/api/rows">(
    example: Example,
    path: P,
    more: Omit<Endpoints[P]["takes"], "text" | "image" | "sample" | "heads">,
  ): Promise<Endpoints[P]["gives"] | null> {
    const what = path + JSON.stringify(more);
    if (!example.request || (fetching?.example === example && fetching.what === what)) return null;
    fetching?.stop.abort();
    const current = (fetching = { what, example, stop: new AbortController() });
    try {
      const body = { ...example.request.input, heads: example.request.heads, ...more } as Endpoints[P]["takes"];
      return await live.ask(path, body, current.stop.signal);
    } finally {
      if (fetching === current) fetching = null;
    }
  }

  const shown = show(root, document, live);

  // parts that take longer arrive while the page is open
  let version = progress.version;
  while (!live.progress.finished) {
    await new Promise((done) => setTimeout(done, SOON));
    if (window.document.hidden) continue;
    try {
      live.progress = await get<LiveProgress>("/api/progress");
      if (live.progress.version !== version) {
        const next = check(await get<HeadDocument>("/api/document"));
        if (next.examples[0] && input) next.examples[0].request = { input, heads: {} };
        version = live.progress.version;
        const fetched = document.examples.slice(next.examples.length);
        Object.assign(document, next, { examples: [...next.examples, ...fetched] });
        shown.renew();
      }
    } catch {
      continue; // the server may be busy, or back in a moment; what a person asks says what is wrong
    }
    for (const listener of [...listeners]) listener();
  }
}

/** What the page carries, so that it shows something before it sends a request; null if it carries nothing. */
function carriedFirst(): FirstPage | null {
  const text = window.document.getElementById("first")?.textContent;
  return text ? (JSON.parse(text) as FirstPage) : null;
}

/** The token that came with the address, after #. It is kept for this tab, and the address is cleared of it. */
function secret(): string {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return sessionStorage.getItem("manyheads.token") ?? "";
  sessionStorage.setItem("manyheads.token", token);
  history.replaceState(null, "", location.pathname);
  return token;
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
