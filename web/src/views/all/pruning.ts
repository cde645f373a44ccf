// The prune curve: what is left of the model as heads go, the least important first; removing at random is the control.
import { extent } from "d3-array";
import { scaleLinear } from "d3-scale";
import { area, line } from "d3-shape";
import { bottom, left } from "../../draw/axis";
import { chart } from "../../draw/chart";
import { svg } from "../../draw/element";
import { measured, percent } from "../../draw/number";
import type { Page } from "../../page";

const WIDTH = 1080;
const HEIGHT = 330;
/** Measures of quality that are errors, or grow with them. */
export const LOWER_IS_BETTER = new Set(["perplexity", "squared error", "squared change", "word error rate"]);
const MARGIN = { left: 52, right: 118, top: 34, bottom: 46 };

export function pruning(page: Page): { figure: HTMLElement; close: () => void } | null {
  const { document, colours } = page;
  const words = page.words.all;
  const curve = document.curve;
  if (!curve?.lines.some((each) => each.kept.length > 1)) return null;
  const quality = words.pruning.quality[curve.quality] ?? curve.quality;
  const one = chart({
    title: words.pruning.title,
    note: (LOWER_IS_BETTER.has(curve.quality) ? words.pruning.noteLess : words.pruning.note) + (curve.sequences ? words.pruning.measured(curve.sequences) : ""),
    name: "prune-curve",
    words: page.words,
    rows: () => [
      ["ranking", "kept", curve.quality, `${curve.quality}_se`],
      ...curve.lines.flatMap((each) => each.kept.map((kept, i) => [each.name, kept, each.mean[i], each.se?.[i]])),
    ],
  });
  const all = curve.lines.flatMap((each) =>
    each.mean.flatMap((value, i) => (value === null ? [] : [value - (each.se?.[i] ?? 0), value + (each.se?.[i] ?? 0)])),
  );
  const [low = 0, high = 1] = extent(all);
  const shares = curve.lines.flatMap((each) => each.kept);
  const x = scaleLinear([Math.max(...shares), Math.min(...shares)], [MARGIN.left, WIDTH - MARGIN.right]);
  const y = scaleLinear([low, high], [HEIGHT - MARGIN.bottom, MARGIN.top]).nice(5);
  const drawing = svg(
    "svg",
    { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, class: "pruning", role: "img", "aria-label": words.pruning.title },
    bottom(x, HEIGHT - MARGIN.bottom, { title: words.pruning.kept, count: 6, format: percent }),
    left(y, MARGIN.left, { title: quality, across: WIDTH - MARGIN.left - MARGIN.right }),
  );
  const labels: { text: string; y: number; colour: string }[] = [];
  for (const [number, each] of curve.lines.entries()) {
    const control = each.name === "random";
    const colour = control ? "var(--soft)" : colours.kind(number);
    const points = each.kept.flatMap((kept, i) => (each.mean[i] === null || each.mean[i] === undefined ? [] : [{ kept, mean: each.mean[i], se: each.se?.[i] ?? null }]));
    if (each.se) {
      const band = area<(typeof points)[0]>((p) => x(p.kept), (p) => y(p.mean - (p.se ?? 0)), (p) => y(p.mean + (p.se ?? 0)));
      drawing.append(svg("path", { d: band(points) ?? "", class: "band", style: `fill:${colour}` }));
    }
    const path = line<(typeof points)[0]>((p) => x(p.kept), (p) => y(p.mean));
    drawing.append(svg("path", { d: path(points) ?? "", class: control ? "line control" : "line", style: `stroke:${colour}` }));
    for (const [i, point] of points.entries())
      drawing.append(svg("circle", { cx: x(point.kept), cy: y(point.mean), r: 3.6, class: "stop", style: `fill:${colour}`, "data-line": each.name, "data-kept": point.kept, "data-value": point.mean, "data-se": point.se, "data-place": i }));
    const end = points.at(-1);
    const name = page.words.methods[each.name] ?? each.name;
    if (end) labels.push({ text: control ? words.pruning.random : name, y: y(end.mean), colour });
  }
  // names stand at the ends of their lines, and never on each other
  labels.sort((a, b) => a.y - b.y);
  for (const [i, label] of labels.entries()) {
    const at = i > 0 ? Math.max(label.y, labels[i - 1]!.y + 15) : label.y;
    label.y = at;
    drawing.append(svg("text", { x: WIDTH - MARGIN.right + 10, y: at, "dominant-baseline": "central", style: `fill:${label.colour}`, class: "name" }, label.text));
  }
  one.body.append(drawing);
  drawing.addEventListener("pointerover", (event) => {
    const stop = (event.target as Element).closest<SVGElement>("[data-line]");
    if (!stop) return page.tip.hide();
    const { line: name = "", kept, value, se } = stop.dataset;
    page.tip.show(event, `${name === "random" ? words.pruning.random : (page.words.methods[name] ?? name)}: ${words.pruning.at(percent(Number(kept)), quality, measured(Number(value), se === undefined ? null : Number(se)))}`);
  });
  drawing.addEventListener("pointerleave", () => page.tip.hide());
  return { figure: one.figure, close: () => {} };
}
