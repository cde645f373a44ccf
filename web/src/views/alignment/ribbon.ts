// An alignment as lines: what was read above, what was written below, and lines as strong as the weights.
import type { Token } from "../../document";
import { svg } from "../../draw/element";
import { plain, textWidth } from "../../draw/tokens";
import type { Weights } from "../../maps";

/** More words than this do not fit on a line; then the matrix alone shows them. */
export const LONGEST = 60;
const FAINTEST = 0.04;
const HEIGHT = 200;

export interface Ribbon {
  drawing: SVGSVGElement;
  /** the words below, which can be chosen */
  targets: SVGGElement[];
  /** Shows the lines of one word (null: of all), and the words they lead to. */
  follow(target: number | null): void;
}

export function ribbon(weights: Weights, queries: Token[], keys: Token[], label: string, names: { above: string; below: string }): Ribbon {
  const above = keys.map((token) => plain(token, 18));
  const below = queries.map((token) => plain(token, 18));
  const width = Math.max(420, total(above), total(below)) + 24;
  const source = places(above, width);
  const target = places(below, width);
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, class: "ribbon", role: "group", "aria-label": label });
  drawing.append(
    svg("text", { x: 4, y: 12, class: "tiny" }, names.above),
    svg("text", { x: 4, y: HEIGHT - 4, class: "tiny" }, names.below),
  );
  const lines: { query: number; key: number; path: SVGPathElement }[] = [];
  for (let query = 0; query < below.length; query++)
    for (let key = 0; key < above.length; key++) {
      const weight = weights.at(query, key);
      if (weight < FAINTEST) continue;
      const [x1, x2] = [source[key]!, target[query]!];
      const path = svg("path", {
        d: `M${x1},46C${x1},${HEIGHT / 2} ${x2},${HEIGHT / 2} ${x2},${HEIGHT - 44}`,
        class: "link",
        "stroke-width": (0.8 + 6 * weight).toFixed(2),
        "stroke-opacity": (0.1 + 0.8 * weight).toFixed(3),
        "data-query": query,
        "data-key": key,
        "data-value": weight,
      });
      lines.push({ query, key, path });
      drawing.append(path);
    }
  const word = (text: string, x: number, y: number) => svg("text", { x, y, "text-anchor": "middle" }, text);
  const sources = above.map((text, key) => svg("g", { class: "source" }, word(text, source[key]!, 36)));
  const targets = below.map((text, query) =>
    svg("g", { class: "target", role: "option", tabindex: "-1", "aria-selected": "false", "data-target": query },
      svg("rect", { x: target[query]! - measure(text) / 2 - 5, y: HEIGHT - 40, width: measure(text) + 10, height: 22, rx: 5 }),
      word(text, target[query]!, HEIGHT - 25))); // prettier-ignore
  drawing.append(...sources, svg("g", { role: "listbox", "aria-label": names.below }, ...targets));

  return {
    drawing,
    targets,
    follow(one) {
      for (const { query, path } of lines) {
        path.classList.toggle("faded", one !== null && query !== one);
        path.classList.toggle("strong", query === one);
      }
      for (const [key, group] of sources.entries()) {
        const weight = one === null ? 0 : weights.at(one, key);
        group.classList.toggle("lit", weight >= 0.2);
        group.classList.toggle("dim", one !== null && weight < 0.05);
      }
      for (const [query, group] of targets.entries()) group.setAttribute("aria-selected", String(query === one));
    },
  };
}

function measure(word: string): number {
  return textWidth(word, 14);
}

function total(words: string[]): number {
  return words.reduce((sum, word) => sum + measure(word) + 18, 0);
}

/** Middles of words that share a line evenly. */
function places(words: string[], width: number): number[] {
  const gap = (width - words.reduce((sum, word) => sum + measure(word), 0)) / words.length;
  let x = gap / 2;
  return words.map((word) => {
    const middle = x + measure(word) / 2;
    x += measure(word) + gap;
    return middle;
  });
}
