// How good the model still is: a number, and every set of heads that was tried beside what rankings give.
import { extent } from "d3-array";
import { scaleLinear } from "d3-scale";
import { line } from "d3-shape";
import type { Quality } from "../../document";
import { bottom, left } from "../../draw/axis";
import { chart } from "../../draw/chart";
import { html, svg } from "../../draw/element";
import { measured, number, percent } from "../../draw/number";
import { LOWER_IS_BETTER } from "../all/pruning";
import type { Bench, Part } from "../live";

const WIDTH = 340;
const HEIGHT = 204;
const FOOT = 46;
/** Measures of how much is as with all heads: there, all heads have 1 or 0 by definition. */
const OF_THE_FULL_MODEL = new Set(["agreement", "cosine", "squared change"]);

export function quality(bench: Bench): Part {
  const { live, page } = bench;
  const { document, words, colours } = page;
  const title = live.progress.reads === "image" ? words.live.qualityPictures : words.live.quality;
  const figure = chart({
    title,
    name: `${document.header.model}-tried`,
    words,
    rows: () => [["kept", live.quality?.metric ?? "quality", "change_se"], ...live.tried.map((one) => [one.kept, one.value, one.se])],
  });
  const value = html("p", { class: "value", "data-part": "quality" });
  const means = html("p", { class: "note" });
  const note = html("p", { class: "note" }, words.live.qualityNote);
  const noise = html("p", { class: "note", "data-part": "noise" }, words.live.noise);
  figure.body.before(value, means, noise);
  figure.body.after(note);
  figure.figure.classList.add("quality");
  let drawn = "";

  /** What the number is, what it is for the whole model, and what it was measured on. */
  function told(now: Quality): string {
    const name = words.live.metrics[now.metric] ?? now.metric;
    const whole = !OF_THE_FULL_MODEL.has(now.metric) ? words.live.allHeads(measured(now.before, now.before_se)) : "";
    return [name, whole, words.live.measuredOn(now.sequences, words.said(document.header.corpus))].filter(Boolean).join("; ");
  }

  function draw(): void {
    const { quality: now, tried } = live;
    const curve = now && document.curve?.quality === now.metric ? document.curve : null;
    const state = JSON.stringify([now, tried.length, curve?.lines.length]);
    if (state === drawn) return;
    drawn = state;
    const lines = (curve?.lines ?? []).map((one) => ({
      name: one.name,
      points: one.kept.flatMap((kept, i) => (typeof one.mean[i] === "number" ? [{ kept, value: one.mean[i] }] : [])),
    }));
    const values = [...tried.map((one) => one.value), ...lines.flatMap((one) => one.points.map((point) => point.value))];
    let [low = 0, high = 1] = extent(values);
    if (!now || !LOWER_IS_BETTER.has(now.metric)) high = 1;
    if (high - low < 1e-6) low = high - 0.05;
    const lowest = Math.min(0.9, ...tried.map((one) => one.kept), ...lines.flatMap((one) => one.points.map((point) => point.kept)));
    const x = scaleLinear([lowest, 1], [44, WIDTH - 24]);
    const y = scaleLinear([low, high], [HEIGHT - FOOT, 14]).nice(4);
    const path = line<{ kept: number; value: number }>((point) => x(point.kept), (point) => y(point.value));
    const drawing = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, role: "img", "aria-label": title },
      left(y, 44, { count: 4, across: WIDTH - 68 }),
      bottom(x, HEIGHT - FOOT, { count: 4, title: words.live.keptAxis, format: (share) => percent(share) }),
      ...lines.flatMap((one, i) => {
        const middle = one.points[Math.floor(one.points.length / 2)];
        const control = one.name === "random";
        const name = control ? words.live.random : (words.live.rankings[one.name] ?? one.name);
        return [
          svg("path", { d: path(one.points) ?? "", class: control ? "line control" : "line", stroke: colours.kind(control ? 7 : i) }),
          middle && svg("text", { x: x(middle.kept) + (control ? 2 : -6), y: y(middle.value) + (control ? 16 : -6), "text-anchor": control ? "start" : "end", class: "name" }, name),
        ];
      }),
      ...tried.filter((one) => one.se).map((one) => svg("path", { d: `M${x(one.kept)},${y(one.value - one.se!)}V${y(one.value + one.se!)}`, class: "error" })),
      ...tried.map((one) => svg("circle", { cx: x(one.kept), cy: y(one.value), r: 3.2, class: "tried" }, svg("title", {}, words.live.tried(percent(one.kept), measured(one.value, one.se))))),
      now && now.value !== null ? svg("circle", { cx: x(now.kept), cy: y(now.value), r: 6, class: "now" }) : null,
    );
    figure.body.replaceChildren(drawing);
  }

  return {
    element: figure.figure,
    update() {
      const now = live.quality;
      figure.figure.hidden = !live.progress.stages.length;
      value.textContent = now ? (now.kept < 1 ? measured(now.value, now.se) : number(now.value)) : "–";
      value.dataset["value"] = now?.value === null || !now ? "" : String(now.value);
      value.dataset["kept"] = now ? String(now.kept) : "";
      means.textContent = now ? told(now) : "";
      noise.hidden = !now?.within_noise;
      if (now) draw();
    },
  };
}
