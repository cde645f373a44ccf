// Axes of charts: ticks with faint lines across, and a title.
import { svg } from "./element";

/** A scale with ticks, such as d3's linear scales. */
export interface Ticked {
  (value: number): number;
  ticks(count?: number): number[];
  tickFormat(count?: number): (value: number) => string;
  range(): number[];
}

export interface AxisOptions {
  title?: string;
  /** about how many ticks */
  count?: number;
  /** ticks in the place of the scale's own */
  values?: number[];
  format?: (value: number) => string;
  /** how far the faint lines reach across the chart */
  across?: number;
}

/** The axis under a chart, at height y. */
export function bottom(scale: Ticked, y: number, options: AxisOptions = {}): SVGGElement {
  const { title, count = 6, across = 0 } = options;
  const values = options.values ?? scale.ticks(count);
  const format = options.format ?? scale.tickFormat(count);
  const [from, to] = ends(scale);
  const axis = svg("g", { class: "axis", transform: `translate(0,${y})` }, svg("path", { d: `M${from},0H${to}` }));
  for (const value of values)
    axis.append(
      svg("line", { x1: scale(value), x2: scale(value), y1: -across, y2: 5 }),
      svg("text", { x: scale(value), y: 18, "text-anchor": "middle" }, format(value)),
    );
  if (title) axis.append(svg("text", { x: (from + to) / 2, y: 36, "text-anchor": "middle" }, title));
  return axis;
}

/** The axis left of a chart, at x. Its title stands above it, where it can be read without turning the head. */
export function left(scale: Ticked, x: number, options: AxisOptions = {}): SVGGElement {
  const { title, count = 5, across = 0 } = options;
  const values = options.values ?? scale.ticks(count);
  const format = options.format ?? scale.tickFormat(count);
  const [from, to] = ends(scale);
  const axis = svg("g", { class: "axis", transform: `translate(${x},0)` }, svg("path", { d: `M0,${from}V${to}` }));
  for (const value of values)
    axis.append(
      svg("line", { x1: -5, x2: across, y1: scale(value), y2: scale(value) }),
      svg("text", { x: -9, y: scale(value), "text-anchor": "end", "dominant-baseline": "central" }, format(value)),
    );
  if (title) axis.append(svg("text", { x: -34, y: Math.min(from, to) - 12 }, title));
  return axis;
}

function ends(scale: Ticked): [number, number] {
  const range = scale.range();
  return [Math.min(...range), Math.max(...range)];
}
