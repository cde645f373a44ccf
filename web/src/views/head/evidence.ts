// What is known about one head over the whole corpus: distances, shares, roles, importance, each against all other heads.
import { mean as average } from "d3-array";
import { scaleLinear } from "d3-scale";
import { unpack, type Numbers } from "../../document";
import { bottom, left } from "../../draw/axis";
import { chart } from "../../draw/chart";
import { html, svg } from "../../draw/element";
import { measured, number, percent, whole } from "../../draw/number";
import { isShare, known, measure, roleName } from "../../measures";
import type { Page } from "../../page";

const WIDTH = 520;
const NAMES = 150;

const axisPercent = (share: number) => `${Math.round(100 * share)}%`;

/** Share of attention at each distance, bars for this head, a line for the mean of all heads. */
export function profile(page: Page, head: number, name: string): HTMLElement | null {
  const { profiles } = page.document;
  if (!profiles) return null;
  const { words } = page;
  const { offsets } = profiles;
  const values = unpack(profiles.mass);
  const full = profiles.mass.dtype === "uint8" ? 255 : profiles.mass.dtype === "uint16" ? 65535 : 1;
  const mass = (of: number, bin: number) => values[of * offsets.length + bin]! / full;
  const own = offsets.map((_, bin) => mass(head, bin));
  const others = offsets.map((_, bin) => average(page.document.heads.name, (_, of) => mass(of, bin)) ?? 0);
  const figure = chart({
    title: words.profile,
    note: words.profileNote,
    name: `${name}-distance`,
    words,
    rows: () => [["distance", "share", "mean_of_all_heads"], ...offsets.map((offset, bin) => [offset, own[bin]!, others[bin]!])],
  });
  const height = 210;
  const start = 44;
  const step = (WIDTH - start - 8) / offsets.length;
  const top = Math.max(0.05, ...own, ...others);
  const y = scaleLinear([0, top], [height - 40, 22]);
  const x = (bin: number) => start + step * bin;
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, width: WIDTH, height, role: "img", "aria-label": `${words.profile}: ${said(offsets, own)}` });
  drawing.append(left(y, start, { count: 4, across: WIDTH - start - 8, format: axisPercent }));
  const every = Math.ceil(offsets.length / 16);
  const axis = svg("g", { class: "axis" });
  for (const [bin, offset] of offsets.entries()) {
    drawing.append(svg("rect", { class: offset === 0 ? "bar zero" : "bar", x: x(bin) + 1, width: Math.max(1, step - 2), y: y(own[bin]!), height: y(0) - y(own[bin]!), "data-offset": offset, "data-value": own[bin]! }, svg("title", {}, `${signed(offset)}: ${percent(own[bin])}`)));
    if (bin % every === 0) axis.append(svg("text", { x: x(bin) + step / 2, y: height - 24, "text-anchor": "middle" }, signed(offset)));
  }
  drawing.append(
    svg("path", { class: "typical", d: offsets.map((_, bin) => `${bin ? "L" : "M"}${(x(bin) + step / 2).toFixed(1)} ${y(others[bin]!).toFixed(1)}`).join("") }),
    axis,
    svg("g", { class: "axis" }, svg("text", { x: start, y: height - 6 }, words.before), svg("text", { x: WIDTH - 8, y: height - 6, "text-anchor": "end" }, words.after)),
    key(words.thisHead, words.meanHead),
  );
  figure.body.append(drawing);
  return figure.figure;
}

function said(offsets: number[], own: number[]): string {
  const best = [...own.keys()].sort((a, b) => own[b]! - own[a]!).slice(0, 3);
  return best.map((bin) => `${signed(offsets[bin]!)} ${percent(own[bin])}`).join(", ");
}

function signed(offset: number): string {
  return offset > 0 ? `+${offset}` : String(offset).replace("-", "−");
}

function key(own: string, typical: string): SVGGElement {
  return svg(
    "g",
    { class: "axis", transform: `translate(${WIDTH - 8},10)` },
    svg("text", { x: 0, y: 0, "text-anchor": "end" }, svg("tspan", { class: "own" }, "■ "), own, svg("tspan", { class: "other", dx: 12 }, "— "), typical),
  );
}

/** Where attention goes: shares with their standard error, and what is usual among all heads. */
export function shares(page: Page, head: number, name: string): HTMLElement | null {
  const { words, document } = page;
  const kinds = Object.keys(document.heads.metrics).filter((kind) => isShare(kind) && !["confidence", "entropy_normalised"].includes(kind));
  if (!kinds.length) return null;
  const rows = kinds.map((kind) => {
    const { mean, se } = document.heads.metrics[kind]!;
    return { kind, value: mean[head] ?? null, se: se[head] ?? null, usual: average(known(mean)) ?? null };
  });
  const figure = chart({
    title: words.shares,
    note: words.sharesNote,
    name: `${name}-shares`,
    words,
    rows: () => [["to", "share", "standard_error", "mean_of_all_heads"], ...rows.map((row) => [row.kind, row.value, row.se, row.usual])],
  });
  const told = (kind: string) => [words.metrics[kind]!.tells, document.groups[kind] ? words.shareOfText(document.groups[kind]) : ""].join(" ").trim();
  const step = 26;
  const height = 16 + step * rows.length + 24;
  const x = scaleLinear([0, 1], [NAMES, WIDTH - 56]);
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${height}`, width: WIDTH, height, role: "img", "aria-label": `${words.shares}: ${rows.map((row) => `${words.metrics[row.kind]!.name} ${percent(row.value)}`).join(", ")}` });
  drawing.append(bottom(x, height - 24, { count: 5, across: height - 34, format: axisPercent }));
  rows.forEach((row, i) => {
    const y = 16 + step * i;
    const means = words.metrics[row.kind]!.name;
    drawing.append(
      svg("text", { x: NAMES - 10, y: y + 12, "text-anchor": "end" }, means, svg("title", {}, told(row.kind))),
      svg("rect", { class: "bar", x: x(0), y, width: Math.max(0, x(row.value ?? 0) - x(0)), height: 16, rx: 2, "data-metric": row.kind, "data-value": row.value }),
      svg("text", { x: x(Math.max(row.value ?? 0, row.usual ?? 0)) + 8, y: y + 12 }, percent(row.value)),
    );
    if (row.usual !== null) drawing.append(svg("line", { class: "typical", x1: x(row.usual), x2: x(row.usual), y1: y - 3, y2: y + 19 }));
    if (row.value !== null && row.se) drawing.append(whisker(x(Math.max(0, row.value - row.se)), x(row.value + row.se), y + 8));
  });
  drawing.append(key(words.thisHead, words.meanHead));
  figure.body.append(drawing);
  return figure.figure;
}

function whisker(from: number, to: number, y: number): SVGPathElement {
  return svg("path", { class: "whisker", d: `M${from} ${y - 4}V${y + 4}M${from} ${y}H${to}M${to} ${y - 4}V${y + 4}` });
}

/** Roles: the score against what somebody would score who knows nothing, with the number of cases. */
export function roles(page: Page, head: number, name: string): HTMLElement | null {
  const { words, document } = page;
  if (!document.roles) return null;
  const { says = {}, against = {}, not_judged } = document.roles;
  const evidence = [...(document.roles.heads[head] ?? [])]
    .filter((one) => one.score !== null)
    .sort((a, b) => Number(b.claimed) - Number(a.claimed) || gain(b) - gain(a));
  const shown = evidence.slice(0, 12);
  const figure = chart({
    title: words.rolesTitle,
    note: words.rolesNote,
    name: `${name}-roles`,
    words,
    rows: () => [["role", "score", "baseline", "cases", "claimed"], ...evidence.map((one) => [one.role, one.score, one.baseline, one.cases, one.claimed ? 1 : 0])],
  });
  const step = 26;
  const height = 16 + step * shown.length + 6;
  const end = WIDTH - 170;
  const drawing = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${height}`,
    width: WIDTH,
    height,
    role: "img",
    "aria-label": `${words.rolesTitle}: ${shown.map((one) => words.roleSaid(roleName(one.role, words), number(one.score), number(one.baseline), one.claimed)).join("; ")}`,
  });
  shown.forEach((one, i) => {
    const y = 30 + step * i;
    const score = one.score ?? 0;
    const baseline = one.baseline ?? 0;
    // shares have one scale; a distance or an entropy has its own
    const x = scaleLinear([Math.min(0, score), Math.max(1, score, baseline)], [NAMES, end]);
    const told = [words.said(says[one.role] ?? ""), against[one.role] ? `${words.baseline}: ${words.said(against[one.role]!)}` : ""].filter(Boolean).join("; ");
    drawing.append(
      svg("text", { x: NAMES - 10, y: y + 4, "text-anchor": "end", class: one.claimed ? "claimed" : "soft" }, roleName(one.role, words), told ? svg("title", {}, told) : null),
      svg("g", { class: "axis" }, svg("line", { x1: NAMES, x2: end, y1: y, y2: y })),
      svg("line", { class: one.claimed ? "gain claimed" : "gain", x1: x(baseline), x2: x(score), y1: y, y2: y }),
      svg("line", { class: "typical", x1: x(baseline), x2: x(baseline), y1: y - 7, y2: y + 7 }),
      svg("circle", { class: one.claimed ? "score claimed" : "score", cx: x(score), cy: y, r: 5.5, "data-role": one.role, "data-value": one.score }),
      svg(
        "text",
        { x: WIDTH - 4, y: y + 4, "text-anchor": "end" },
        svg("tspan", { class: one.claimed ? "claimed" : null }, number(score, 2)),
        svg("tspan", { class: "soft", dx: 4 }, `/ ${number(one.baseline, 2)}`),
        svg("tspan", { class: "soft", dx: 8 }, words.cases(whole(one.cases ?? 0))),
      ),
    );
  });
  drawing.append(
    svg(
      "g",
      { class: "axis" },
      svg(
        "text",
        { x: WIDTH - 4, y: 10, "text-anchor": "end" },
        svg("tspan", { class: "claimed" }, "● "),
        words.claimed,
        svg("tspan", { dx: 12 }, "● "),
        words.notClaimed,
        svg("tspan", { class: "other", dx: 12 }, "| "),
        words.baseline,
      ),
    ),
  );
  figure.body.append(shown.length ? drawing : html("p", { class: "note" }, words.noEvidence));
  const missing = Object.entries(not_judged).map(([role, why]) => `${roleName(role, words)}${why ? ` (${words.said(why)})` : ""}`);
  if (missing.length) figure.body.append(html("p", { class: "note" }, words.notJudged(missing.join("; "))));
  return figure.figure;
}

function gain(one: { score: number | null; baseline: number | null }): number {
  return Math.abs((one.score ?? 0) - (one.baseline ?? 0));
}

/** "17 of 144": how many heads have more, plus one. */
export function rank(values: Numbers, head: number): number | null {
  const own = values[head];
  return own === null || own === undefined ? null : 1 + known(values).filter((value) => value > own).length;
}

/** Importance by each method: every head a thin mark, this one a dot with its standard error. */
export function importance(page: Page, head: number, name: string): HTMLElement | null {
  const { words, document } = page;
  const methods = Object.entries(document.importance);
  if (!methods.length) return null;
  const figure = chart({
    title: words.importanceTitle,
    note: words.importanceNote,
    name: `${name}-importance`,
    words,
    rows: () => [["method", "importance", "standard_error", "rank", "heads"], ...methods.map(([method, { mean, se }]) => [method, mean[head] ?? null, se[head] ?? null, rank(mean, head), known(mean).length])],
  });
  const step = 52;
  const height = 8 + step * methods.length;
  const drawing = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${height}`,
    width: WIDTH,
    height,
    role: "img",
    "aria-label": `${words.importanceTitle}: ${methods.map(([method, { mean, se }]) => `${words.methods[method] ?? method} ${measured(mean[head], se[head])}`).join("; ")}`,
  });
  methods.forEach(([method, { mean, se }], i) => {
    const y = 8 + step * i;
    const values = known(mean);
    const x = scaleLinear([Math.min(0, ...values), Math.max(...values, 1e-12)], [4, WIDTH - 8]);
    const own = mean[head];
    const error = se[head];
    const place = rank(mean, head);
    drawing.append(
      svg("text", { x: 0, y: y + 12, style: "font-weight:560" }, words.methods[method] ?? method),
      svg("text", { x: WIDTH - 4, y: y + 12, "text-anchor": "end" }, measured(own, error), svg("tspan", { class: "soft", dx: 4 }, measure(document, `importance:${method}`, words).unit), svg("tspan", { class: "soft", dx: 10 }, place === null ? "" : words.rank(place, values.length))),
      svg("path", { class: "others", d: values.map((value) => `M${x(value).toFixed(1)} ${y + 24}v14`).join("") }),
      svg("g", { class: "axis" }, svg("line", { x1: x(0), x2: WIDTH - 8, y1: y + 40, y2: y + 40 })),
    );
    if (own === null || own === undefined) return;
    if (error) drawing.append(whisker(Math.max(2, x(own - error)), Math.min(WIDTH - 2, x(own + error)), y + 31));
    drawing.append(svg("circle", { class: "score own", cx: x(own), cy: y + 31, r: 5.5, "data-method": method, "data-value": own }));
  });
  figure.body.append(drawing);
  return figure.figure;
}
