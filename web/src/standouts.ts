// The heads worth a first click, and why: read off the numbers of the document, nothing is measured.
import { unverified } from "./doubts";
import type { HeadDocument, Numbers } from "./document";
import { number, percent } from "./draw/number";
import { known, rankingMethod, roleName } from "./measures";
import type { Words } from "./words";

export interface Standout {
  kind: keyof Words["start"]["kinds"];
  /** the head, or the two of a pair; the last one is the one that is shown */
  heads: number[];
  /** why, in words and a number */
  why: string;
}

const MOST = 5;
/** a share of attention from which on it is worth telling */
const MUCH = 0.4;
// roles that say more than where a head attends; all others are told by their shares
const TELLING = ["induction", "retrieval", "copying", "duplicate"];

/** At most five, the most telling first; no head comes twice, and none that is not verified. */
export function standouts(document: HeadDocument, words: Words): Standout[] {
  const text = words.start;
  const used = new Set<number>();
  const free = (head: number) => !used.has(head) && !unverified(document, head);
  const metric = (key: string): Numbers => document.heads.metrics[key]?.mean ?? [];
  const chosen: Standout[] = [];
  const add = (kind: Standout["kind"], heads: number[], why: string) => {
    chosen.push({ kind, heads, why });
    for (const head of heads) used.add(head);
  };
  /** The free head with the largest value, which must exceed `least`. */
  const top = (values: Numbers, least = -Infinity): { head: number; value: number } | undefined => {
    let best: { head: number; value: number } | undefined;
    for (const [head, value] of values.entries())
      if (value !== null && free(head) && value > (best?.value ?? least)) best = { head, value };
    return best;
  };
  /** The largest of several shares of attention, and which it is. */
  const share = <K extends string>(keys: readonly K[]) =>
    keys.flatMap((key) => {
      const best = top(metric(key), MUCH);
      return best ? [{ ...best, key }] : [];
    }).sort((a, b) => b.value - a.value)[0]; // prettier-ignore

  if (document.heads.labels["moved"]) {
    const { moved, matched } = document.heads.labels;
    const by = metric("attention");
    const far = by.map((value, head) => (moved[head] === "yes" ? value : null));
    for (let best = top(far); best && chosen.length < MOST; best = top(far))
      add("moved", [best.head], text.movedWhy(number(best.value), matched?.[best.head] ?? "–"));
    return chosen;
  }

  const position = share(["previous", "next", "self"]);
  if (position) add("position", [position.head], text.positionWhy(percent(position.value), text.position[position.key]));

  const method = rankingMethod(document);
  const importance = method === undefined ? [] : document.importance[method]!.mean;
  const mean = known(importance).reduce((sum, value) => sum + value, 0) / Math.max(1, known(importance).length);
  const important = mean > 0 ? top(importance, mean) : undefined;
  if (important) add("important", [important.head], text.importantWhy(number(important.value / mean, 1), words.methods[method!] ?? method!));

  for (const role of TELLING) {
    const of = document.roles?.heads.map((evidence) => evidence.find((one) => one.role === role && one.claimed)) ?? [];
    const best = top(of.map((one) => one?.score ?? null));
    if (!best) continue;
    add("role", [best.head], text.roleWhy(roleName(role, words), number(best.value, 2), number(of[best.head]!.baseline, 2)));
    break;
  }

  const { twin = [], twin_distance = [] } = document.redundancy ?? {};
  const near = top(twin_distance.map((distance, head) => (distance === null || !free(twin[head] ?? -1) || (twin[head] ?? -1) < 0 ? null : -distance)));
  if (near) add("pair", [twin[near.head]!, near.head], text.pairWhy(number(-near.value)));

  const sink = share(["special", "first"]);
  if (sink) add("sink", [sink.head], text.sinkWhy(percent(sink.value), text.sink[sink.key]));

  const broad = top(metric("effective_keys"));
  if (broad) add("broad", [broad.head], text.broadWhy(number(broad.value, 1)));
  const sharp = top(metric("confidence"));
  if (sharp) add("sharp", [sharp.head], text.sharpWhy(percent(sharp.value)));
  return chosen.slice(0, MOST);
}
