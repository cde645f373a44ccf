// An alignment as a matrix: a row for each word written, a column for each word read.
import type { Token } from "../../document";
import { ink, type Colours } from "../../draw/colour";
import { svg } from "../../draw/element";
import { percent } from "../../draw/number";
import { picture } from "../../draw/pixels";
import { plain } from "../../draw/tokens";
import { pool, type Weights } from "../../maps";

const LEFT = 128;
const TOP = 84;

export interface AlignmentMatrix {
  drawing: SVGSVGElement;
  follow(target: number | null): void;
}

export function alignmentMatrix(weights: Weights, queries: Token[], keys: Token[], label: string, colours: Colours): AlignmentMatrix {
  const cells = weights.rows <= 60 && weights.columns <= 60;
  const { weights: shown, rowSize, columnSize } = cells ? { weights, rowSize: 1, columnSize: 1 } : pool(weights, 512);
  const size = Math.max(1, Math.min(30, 560 / Math.max(shown.columns, shown.rows)));
  const [width, height] = [size * shown.columns, size * shown.rows];
  const drawing = svg("svg", { viewBox: `0 0 ${LEFT + width + 30} ${TOP + height + 8}`, width: LEFT + width + 30, class: "alignment", role: "img", "aria-label": label });
  if (cells) {
    for (let row = 0; row < shown.rows; row++)
      for (let column = 0; column < shown.columns; column++) {
        const weight = shown.at(row, column);
        const fill = colours.ramp(weight);
        const [x, y] = [LEFT + column * size, TOP + row * size];
        drawing.append(svg("rect", { x, y, width: size - 1, height: size - 1, fill, "data-query": row, "data-key": column, "data-value": weight }));
        if (size >= 24 && weight >= 0.095)
          drawing.append(svg("text", { x: x + size / 2, y: y + size / 2, class: `inside ${ink(fill) === "#ffffff" ? "bright" : "deep"}`, "text-anchor": "middle", "dominant-baseline": "central" }, percent(weight).replace("%", "")));
      }
  } else {
    const url = picture(shown.rows, shown.columns, (row, column) => Math.sqrt(shown.at(row, column)), colours);
    drawing.append(svg("image", { x: LEFT, y: TOP, width, height, href: url, preserveAspectRatio: "none", class: "pixels" }));
  }
  // as many names as can be read
  const stepRows = Math.ceil((15 * shown.rows) / height);
  const stepColumns = Math.ceil((15 * shown.columns) / width);
  for (let row = 0; row < shown.rows; row += stepRows)
    drawing.append(svg("text", { x: LEFT - 8, y: TOP + (row + 0.5) * size, "text-anchor": "end", "dominant-baseline": "central", class: "row-name" }, named(queries[row * rowSize])));
  for (let column = 0; column < shown.columns; column += stepColumns)
    drawing.append(
      svg("text", { transform: `translate(${LEFT + (column + 0.5) * size},${TOP - 8}) rotate(-50)`, "dominant-baseline": "central" }, named(keys[column * columnSize])),
    );
  const mark = svg("rect", { x: LEFT - 1.5, width: width + 2, height: Math.max(3, size + 1), class: "followed", visibility: "hidden" });
  drawing.append(mark);
  return {
    drawing,
    follow(target) {
      mark.setAttribute("visibility", target === null ? "hidden" : "visible");
      if (target !== null) mark.setAttribute("y", String(TOP + Math.floor(target / rowSize) * size - 1.5));
    },
  };
}

function named(token: Token | undefined): string {
  return token ? plain(token, 14) : "";
}
