// What Python measured, as the page reads it: src/manyheads/view/document writes exactly this (version 1).
// Numbers are null where nothing counts. `n` is the number of heads; their order is that of the HeadTable's rows.

export type Numbers = (number | null)[];

/** Numbers packed as little-endian bytes in base64. */
export interface Packed {
  dtype: "uint8" | "uint16" | "float32";
  shape: number[];
  data: string;
}

export interface Measured {
  mean: Numbers;
  se: Numbers;
}

export interface Heads {
  site: string[];
  layer: number[];
  head: number[];
  original_head: number[];
  kv_head: number[];
  kind: string[];
  name: string[];
  tokens: Numbers;
  metrics: Record<string, Measured>;
  labels: Record<string, string[]>;
}

export interface Layer {
  layer: number;
  site: string;
  heads: number[];
}

export interface Stack {
  name: string;
  kind: string;
  layers: Layer[];
}

export interface Profiles {
  offsets: number[];
  mass: Packed;
}

export interface RoleEvidence {
  role: string;
  score: number | null;
  baseline: number | null;
  cases: number | null;
  claimed: boolean;
}

export interface Roles {
  names: string[];
  /** what each role says about a head, and what its baseline is, in words */
  says?: Record<string, string>;
  against?: Record<string, string>;
  heads: RoleEvidence[][];
  not_judged: Record<string, string>;
}

export interface Redundancy {
  x: Numbers;
  y: Numbers;
  cluster: number[];
  twin: number[];
  twin_distance: Numbers;
  nearest: [number, number][][];
  matrix: Packed | null;
  layers: { layer: number; site: string; diversity: number | null }[];
}

export interface Curve {
  quality: string;
  /** how many sequences it was measured on */
  sequences?: number;
  /** for each ranking the shares of heads that are kept, and the quality then */
  lines: { name: string; kept: number[]; mean: Numbers; se?: Numbers }[];
}

export type Mark = "joined" | "space" | "special" | "unknown" | "newline" | "byte" | null;

export interface Token {
  text: string;
  shown: string;
  mark: Mark;
}

export interface Maps {
  site: string;
  queries: string;
  keys: string;
  thumbnails: Packed;
  peak: number[];
  exact: Record<string, Packed>;
  pooled?: Packed | null;
  row_size?: number;
  column_size?: number;
}

export interface PipelineStep {
  step: string;
  /** the attention it belongs to */
  site?: string;
  shape: number[];
  values: unknown;
}

export type Item = [string, number];

export interface Answer {
  kind: string;
  items: Item[];
}

export interface Example {
  kind: "text" | "image" | "pair";
  title: string;
  tokens: Record<string, Token[]>;
  picture?: { png: string; rows: number; columns: number; first: number } | null;
  maps: Maps[];
  pipeline?: PipelineStep[] | null;
  answer?: Answer | null;
  silenced?: { change: Numbers; answer: Item[][] | null } | null;
  /** on the live page: what the server was asked, to ask it for more */
  asked?: { input: object; heads: Record<string, number[]> };
  /** on the live page: by query and site, exact rows (heads, keys) that were asked for */
  rows?: Record<number, Record<string, Packed>>;
}

export interface HeadDocument {
  version: number;
  made: {
    manyheads: string;
    model: string;
    fingerprint: string;
    corpus: string;
    units: number;
    unit: string;
    notes: string[];
  };
  heads: Heads;
  stacks: Stack[];
  profiles: Profiles | null;
  roles: Roles | null;
  importance: Record<string, Measured>;
  redundancy: Redundancy | null;
  curve: Curve | null;
  groups: Record<string, string>;
  examples: Example[];
}

function bytesOf(base64: string): Uint8Array<ArrayBuffer> {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

const unpacked = new WeakMap<Packed, Uint8Array | Uint16Array | Float32Array>();

/** The numbers of a packed array, decoded once. */
export function unpack(packed: Packed): Uint8Array | Uint16Array | Float32Array {
  let values = unpacked.get(packed);
  if (!values) {
    const bytes = bytesOf(packed.data);
    // typed arrays read little-endian on every machine that runs a browser
    if (packed.dtype === "uint8") values = bytes;
    else if (packed.dtype === "uint16") values = new Uint16Array(bytes.buffer);
    else values = new Float32Array(bytes.buffer);
    const wanted = packed.shape.reduce((a, b) => a * b, 1);
    if (values.length !== wanted) throw new Error(`${packed.dtype} array of ${values.length}, its shape says ${wanted}`);
    unpacked.set(packed, values);
  }
  return values;
}

/** Reads the document that a report carries: base64 of gzip of JSON. Works without network, also from file://. */
export async function inflate(base64: string): Promise<HeadDocument> {
  return parse(bytesOf(base64.trim()));
}

/** Reads the document from gzip bytes. */
export async function parse(gzip: Uint8Array<ArrayBuffer>): Promise<HeadDocument> {
  const stream = new Blob([gzip]).stream().pipeThrough(new DecompressionStream("gzip"));
  return check(JSON.parse(await new Response(stream).text()));
}

export function check(document: HeadDocument): HeadDocument {
  if (document.version !== 1) throw new Error(`a document of version ${document.version}; this page reads version 1`);
  return document;
}
