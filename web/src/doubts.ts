// What one must know of a head before reading its numbers: why its site is not verified, and notes.
import type { HeadDocument } from "./document";
import { html } from "./draw/element";
import type { Page } from "./page";

const NO = "no: ";

/** Why it was not proved what a head is; "" where it was. */
export function unverified(document: HeadDocument, head: number): string {
  const verified = document.heads.labels["verified"]?.[head] ?? "";
  return verified.startsWith(NO) ? verified.slice(NO.length) : "";
}

/** How many heads are not verified. */
export function unverifiedCount(document: HeadDocument): number {
  return document.heads.name.filter((_, head) => unverified(document, head)).length;
}

/** The reason and the notes of a head as paragraphs; nothing where there is nothing to say. */
export function doubts(page: Page, head: number): HTMLElement[] {
  const { document, words } = page;
  const why = unverified(document, head);
  const note = document.heads.labels["notes"]?.[head] ?? "";
  const found = [];
  if (why) found.push(html("p", { class: "doubt", "data-doubt": "unverified" }, html("b", {}, `${words.notVerified}: `), words.said(why)));
  if (note) found.push(html("p", { class: "remark", "data-doubt": "note" }, html("b", {}, `${words.siteNote}: `), note.split("; ").map(words.said).join("; ")));
  return found;
}
