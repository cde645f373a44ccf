// A small matrix as coloured cells. Every cell carries its number, which the pointer shows.
import { scaleLinear } from "d3-scale";
import { svg } from "./element";

export type Matrix = readonly (readonly (number | null)[])[];

export interface CellsOptions {
  x: number;
  y: number;
  /** of one cell */
  width: number;
  height: number;
  colour: (value: number | null) => string;
  /** what the matrix is called, for screen readers and for the pointer */
  name: string;
  /** what rows and columns are: "rows" are tokens (the usual), "columns" are, or "both" */
  tokens?: "rows" | "columns" | "both";
}

/** Draws a matrix; each cell has data-row, data-column and data-value. */
export function cells(values: Matrix, options: CellsOptions): SVGGElement {
  const { x, y, width, height, colour, name, tokens = "rows" } = options;
  const group = svg("g", {
    class: "cells",
    transform: `translate(${x},${y})`,
    role: "img",
    "aria-label": name,
    "data-matrix": name,
    "data-tokens": tokens,
  });
  const gap = Math.min(width, height) > 6 ? 1 : 0;
  for (const [row, numbers] of values.entries())
    for (const [column, value] of numbers.entries())
      group.append(
        svg("rect", {
          x: column * width,
          y: row * height,
          // cells that touch overlap by a hair, or the page would shine through between them
          width: gap ? width - gap : width + 0.3,
          height: height - gap,
          fill: colour(value),
          "data-row": row,
          "data-column": column,
          "data-value": value,
        }),
      );
  return group;
}

/** Colours for numbers of both signs: orange below zero, blue above, as strong as the number is large. */
export function signed(values: Matrix, dark: boolean): (value: number | null) => string {
  const sizes = values.flatMap((row) => row.map((value) => Math.abs(value ?? 0))).sort((a, b) => a - b);
  // a few channels are far larger than all others: they must not make the rest grey
  const most = sizes[Math.floor(0.97 * (sizes.length - 1))] || sizes.at(-1) || 1;
  const scale = scaleLinear<string>()
    .domain([-most, -most / 2, 0, most / 2, most])
    .range(
      dark ? ["#ffb566", "#a3641c", "#232b34", "#2b6a9c", "#8fcbff"] : ["#a84c00", "#f0a85a", "#f3f5f7", "#74acd5", "#0a4f8c"],
    )
    .clamp(true);
  return (value) => (value === null ? "none" : scale(value));
}

/** The matrix with rows and columns changed over. */
export function transposed(values: Matrix): (number | null)[][] {
  return (values[0] ?? []).map((_, column) => values.map((row) => row[column] ?? null));
}
