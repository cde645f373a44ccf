// Tokens as a person can read them: whatever a token holds is shown as visible text of a bounded length.
import type { Token } from "../document";
import { html } from "./element";

const LONGEST = 24;

// What would not be seen, or would change how its neighbours are drawn: controls, bidirectional overrides, byte order
// marks, variation and zero-width characters that stand alone, halves of surrogate pairs.
// eslint-disable-next-line no-control-regex
const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff0-\uffff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

const NAMED: Record<string, string> = { "\n": "⏎", "\r": "␍", "\t": "⇥", "\u007f": "␡" };

function picture(character: string): string {
  const named = NAMED[character];
  if (named) return named;
  const code = character.charCodeAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  return `‹${code.toString(16).toUpperCase().padStart(4, "0")}›`;
}

/** Text with everything invisible made visible. */
export function visible(text: string): string {
  return text.replace(HIDDEN, picture);
}

/** The first characters as a reader counts them (an emoji family is one), then an ellipsis. */
export function shorten(text: string, longest = LONGEST): string {
  if (text.length <= longest) return text;
  const start = text.slice(0, 40 * longest); // a character of a reader is rarely more than 40 code units
  const segments =
    "Segmenter" in Intl ? Array.from(new Intl.Segmenter().segment(start), (part) => part.segment) : Array.from(start);
  if (segments.length <= longest && start.length === text.length) return text;
  return segments.slice(0, longest - 1).join("") + "…";
}

export interface Shown {
  /** drawn faintly before the text: "-" continues a word, "·" a space, "" nothing */
  prefix: string;
  text: string;
  special: boolean;
}

/** How a token is written on the page. */
export function shown(token: Token, longest = LONGEST): Shown {
  const mark = token.mark;
  let text = token.shown.slice(0, 2000); // some are a hundred thousand characters
  if (/^\s+$/.test(text)) text = text.replace(/ /g, "␣").replace(/[^\S\n\r\t]/g, "␣");
  text = shorten(visible(text), longest);
  if (text === "") text = mark === "newline" ? "⏎" : mark === "space" ? "␣" : "∅";
  const prefix = mark === "joined" ? "-" : mark === "space" && !/^[␣⇥□]+$/.test(text) ? "·" : "";
  return { prefix, text, special: mark === "special" || mark === "unknown" || mark === "newline" || mark === "byte" };
}

let pen: CanvasRenderingContext2D | null = null;

/** How a token is written where there is room for so many pixels. */
export function fit(token: Token, width: number, size = 12): Shown {
  for (let longest = LONGEST; ; longest = Math.floor(longest * 0.8)) {
    const now = shown(token, longest);
    if (longest <= 3 || textWidth(now.prefix + now.text, size) <= width) return now;
  }
}

/** How many pixels a text takes. */
export function textWidth(text: string, size = 12): number {
  pen ??= document.createElement("canvas").getContext("2d")!;
  pen.font = `${size}px system-ui, sans-serif`;
  return pen.measureText(text).width;
}

/** A token as one string, for labels and tables. */
export function plain(token: Token, longest = LONGEST): string {
  const { prefix, text } = shown(token, longest);
  return prefix + text;
}

/** A token as an element: isolated, so that right-to-left text does not move its neighbours. */
export function tokenElement(token: Token, longest = LONGEST): HTMLElement {
  const { prefix, text, special } = shown(token, longest);
  const element = html("bdi", { class: special ? "token special" : "token" });
  if (prefix) element.append(html("span", { class: "faint", "aria-hidden": "true" }, prefix));
  element.append(text);
  return element;
}
