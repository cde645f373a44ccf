// Reads the document that Python wrote. Its types are generated from Python's: contract.ts.
import { VERSION, type Example as WrittenExample, type HeadDocument as WrittenDocument, type Packed, type SiteHeads } from "./contract";

export type * from "./contract";

/** The input of a request of the live page. */
export type Input = { text: string } | { image: string } | { sample: number };

/** An example, and what the live page fetches for it. */
export interface Example extends WrittenExample {
  /** the request that it came from, to ask for more */
  request?: { input: Input; heads: SiteHeads };
  /** by query and site: exact rows (heads, keys) */
  rows?: Record<number, Record<string, Packed>>;
}

export interface HeadDocument extends WrittenDocument {
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
  if (document.version !== VERSION) throw new Error(`a document of version ${document.version}; this page reads version ${VERSION}`);
  return document;
}
