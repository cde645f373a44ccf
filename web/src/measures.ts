// What can colour a head: every metric of the table, importance by each method, the distance to its twin, role, cluster.
import { unverified } from "./doubts";
import type { HeadDocument, Numbers, RoleEvidence } from "./document";
import type { Colours } from "./draw/colour";
import { measured } from "./draw/number";
import type { Words } from "./words";

export interface Measure {
  key: string;
  group: "statistics" | "importance" | "comparison";
  name: string;
  /** a sentence: what it tells */
  tells: string;
  /** what it is counted in; "" for a number that only compares heads */
  unit: string;
  mean: Numbers;
  se: Numbers;
  /** colours without an order: its kinds' names, of which mean gives the number (null: none) */
  kinds?: string[];
  /** least and most of the scale */
  domain: [number, number];
  /** where a value stands on the scale, from 0 to 1 (more intense) */
  share(value: number): number;
}

// methods that ask the head alone: they say nothing about what the model would lose without it
const OF_THE_HEAD_ALONE = new Set(["output-norm", "confidence", "random"]);

/** What a comparison adds to the name of a metric. */
const CHANGE = /_change$/;

const SHARES = new Set(["entropy_normalised", "confidence", "self", "previous", "next", "first", "special", "rare", "frequent", "local"]);

/** Whether a metric is a share of attention, or the change of one, to be written in percent. */
export function isShare(key: string): boolean {
  return SHARES.has(key.replace(CHANGE, ""));
}

/** Whether the document compares two models or two texts. */
export function comparing(document: HeadDocument): boolean {
  return Object.keys(document.heads.metrics).some((key) => CHANGE.test(key));
}

/** A metric's name, unit and meaning; those of a comparison are changes of another. */
function about(key: string, words: Words): { name: string; unit: string; tells: string } {
  const of = words.metrics[key.replace(CHANGE, "")];
  if (CHANGE.test(key) && of) return { name: words.changeOf(of.name), unit: of.unit, tells: words.changeTells(of.name, of.tells) };
  return words.metrics[key] ?? { name: key, tells: "", unit: "" };
}

export function measureKeys(document: HeadDocument): string[] {
  const keys = Object.keys(document.heads.metrics).filter((key) => !(key === "twin_distance" && document.redundancy));
  keys.push(...Object.keys(document.importance).map((method) => `importance:${method}`));
  if (document.redundancy) keys.push("redundancy", "cluster");
  if (document.roles) keys.push("role");
  return keys;
}

/** The measure of that key, or the first there is. */
export function measure(document: HeadDocument, key: string, words: Words): Measure {
  const method = key.startsWith("importance:") ? key.slice("importance:".length) : null;
  if (method !== null && document.importance[method]) {
    const { mean, se, measure: what = "" } = document.importance[method];
    const top = Math.max(0, ...known(mean));
    const share = (value: number) => (top > 0 ? Math.sqrt(Math.max(0, value) / top) : 0);
    const name = words.importanceBy(words.methods[method] ?? method);
    const tells = OF_THE_HEAD_ALONE.has(method) ? words.importanceAlone : words.importanceTells;
    const measured = what ? `${tells} ${words.measuredAs(words.said(what))}` : tells;
    return { key, group: "importance", name, tells: measured, unit: unitOf(method, what, words), mean, se, domain: [0, top], share };
  }
  if (key === "redundancy" && document.redundancy) {
    const mean = document.redundancy.twin_distance;
    const top = Math.max(0, ...known(mean)) || 1;
    const se = document.heads.metrics["twin_distance"]?.se ?? mean.map(() => null);
    const { name, tells, unit } = words.redundancy;
    return { key, group: "comparison", name, tells, unit, mean, se, domain: [0, top], share: (value) => 1 - value / top };
  }
  if (key === "cluster" && document.redundancy) {
    const cluster = document.redundancy.cluster;
    const shared = counted(cluster.filter((number) => number >= 0)).filter(([, count]) => count > 1);
    const order = shared.map(([number]) => number);
    const mean = cluster.map((number) => (order.includes(number) ? order.indexOf(number) : null));
    return kinds(key, words.cluster.name, words.cluster.tells, mean, order.map((_, i) => words.clusterName(i + 1)));
  }
  if (key === "role" && document.roles) {
    const names = document.roles.heads.map((evidence) => mainRole(evidence)?.role ?? null);
    const order = counted(names.filter((name) => name !== null)).map(([name]) => name);
    const mean = names.map((name) => (name === null ? null : order.indexOf(name)));
    return kinds(key, words.role.name, words.role.tells, mean, order.map((name) => roleName(name, words)));
  }
  const found = document.heads.metrics[key] ?? Object.values(document.heads.metrics)[0] ?? { mean: [], se: [] };
  const { name, tells, unit } = about(key, words);
  const values = known(found.mean);
  let low = Math.min(...values);
  const high = Math.max(...values);
  if (!values.length || (isShare(key) && low >= 0) || (low >= 0 && low < high / 2)) low = 0;
  const span = high - low;
  const share = (value: number) => (span > 0 ? (value - low) / span : value > 0 ? 1 : 0);
  return { key, group: "statistics", name, tells, unit, mean: found.mean, se: found.se, domain: [low, high], share };
}

/** The unit of what a method measures, read off its sentence. */
function unitOf(method: string, what: string, words: Words): string {
  if (method === "confidence") return words.redundancy.unit; // a share, of 1
  const units = words.importanceUnits;
  if (/nats a token/.test(what)) return units.token;
  if (/nats a sequence/.test(what)) return units.sequence;
  if (/cosine/.test(what)) return units.cosine;
  if (/^slope/.test(what)) return units.slope;
  if (/^increase/.test(what)) return units.increase;
  return /^half the square/.test(what) ? units.square : "";
}

function kinds(key: string, name: string, tells: string, mean: Numbers, names: string[]): Measure {
  const se = mean.map(() => null);
  return { key, group: "comparison", name, tells, unit: "", mean, se, kinds: names, domain: [0, names.length], share: () => 0 };
}

/** Colour of a head; more than seven kinds share the last colour. */
export function colourOf(measure: Measure, head: number, colours: Colours): string {
  const value = measure.mean[head];
  if (value === null || value === undefined) return colours.nothing;
  return measure.kinds ? colours.kind(Math.min(value, 7)) : colours.ramp(measure.share(value));
}

/** A head's value with its standard error, shares in percent; or its kind by name. */
export function written(measure: Measure, head: number): string {
  const mean = measure.mean[head];
  const se = measure.se[head];
  if (mean === null || mean === undefined) return "–";
  if (measure.kinds) return measure.kinds[mean]!;
  return isShare(measure.key) ? measured(100 * mean, se === null || se === undefined ? se : 100 * se) : measured(mean, se);
}

/** The method that ranks heads by what the model would lose: the first that does not ask the head alone. */
export function rankingMethod(document: HeadDocument): string | undefined {
  return Object.keys(document.importance).find((name) => !OF_THE_HEAD_ALONE.has(name));
}

export function known(numbers: Numbers): number[] {
  return numbers.filter((value): value is number => value !== null);
}

/** Values with how often they come, most frequent first. */
function counted<T>(values: T[]): [T, number][] {
  const counts = new Map<T, number>();
  for (const value of values) counts.set(value, (counts.get(value) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

// roles that many heads have, the most common last; those not named here, such as syntax, are more specific than any
const COMMON = ["duplicate", "previous", "next", "self", "separator", "sink", "rare", "broad", "no-op", "local", "global"];

/** The most specific of a head's claimed roles. */
export function mainRole(evidence: RoleEvidence[]): RoleEvidence | undefined {
  return evidence.filter((one) => one.claimed).sort((a, b) => COMMON.indexOf(a.role) - COMMON.indexOf(b.role))[0];
}

/** heads whose attention is this close (Jensen-Shannon distance, from 0 to 1) do nearly the same */
const ALIKE = 0.25;

export interface Filter {
  key: string;
  name: string;
  heads: ReadonlySet<number>;
}

/** The filters that find something: heads that are not verified, claimed roles, cuttable heads (where it was measured what the model needs), redundant heads. */
export function filters(document: HeadDocument, words: Words): Filter[] {
  const found: Filter[] = [];
  const add = (key: string, name: string, heads: number[]) => {
    if (heads.length) found.push({ key, name, heads: new Set(heads) });
  };
  const all = document.heads.name.map((_, head) => head);
  const proved = (head: number) => !unverified(document, head);
  add("unverified", words.notVerified, all.filter((head) => !proved(head)));
  const method = rankingMethod(document);
  if (method !== undefined) add("cuttable", words.cuttable, cuttable(document.importance[method]!.mean).filter(proved));
  if (document.redundancy) {
    const { twin_distance } = document.redundancy;
    add("redundant", words.redundant, all.filter((head) => (twin_distance[head] ?? 1) <= ALIKE));
  }
  if (document.roles) {
    const { heads } = document.roles;
    const claims = counted(heads.flatMap((evidence) => evidence.filter((one) => one.claimed).map((one) => one.role)));
    for (const [role] of claims)
      add(role, roleName(role, words), all.filter((head) => heads[head]?.some((one) => one.claimed && one.role === role)));
  } else {
    // without judged roles, the share itself says it
    for (const key of ["previous", "next", "self"] as const)
      add(key, words.roles[key]!, all.filter((head) => (document.heads.metrics[key]?.mean[head] ?? 0) >= 0.5));
    const share = (key: string, head: number) => document.heads.metrics[key]?.mean[head] ?? 0;
    add("sink", words.roles["sink"]!, all.filter((head) => Math.max(share("first", head), share("special", head)) >= 0.5));
  }
  return found;
}

/** The least important heads that together hold no more than a twentieth of all importance. */
export function cuttable(importance: Numbers): number[] {
  const order = importance.map((value, head) => ({ value: Math.max(0, value ?? Infinity), head })).filter((one) => Number.isFinite(one.value));
  const total = order.reduce((sum, one) => sum + one.value, 0);
  let held = 0;
  return order
    .sort((a, b) => a.value - b.value)
    .filter((one) => (held += one.value) <= total / 20)
    .map((one) => one.head);
}

/** A role as a person reads it: "Previous", "2 back", "obj to head". */
export function roleName(role: string, words: Words): string {
  const offset = /^offset ([+-]?\d+)$/.exec(role);
  return offset ? words.offsetRole(Number(offset[1])) : (words.roles[role] ?? role);
}
