// Layers have an order, so their colours have one, too: from pale to strong, never as pale as the page.
import { svg } from "../../draw/element";
import type { Colours } from "../../draw/colour";
import type { HeadDocument } from "../../document";

export interface Layers {
  /** place of a head's layer in the model, from 0 */
  place: number[];
  count: number;
  names: string[];
  colour(place: number): string;
}

/** Every site is a layer here, in the order of the document. */
export function layersOf(document: HeadDocument, colours: Colours): Layers {
  const sites: string[] = [];
  const names: string[] = [];
  for (const [head, site] of document.heads.site.entries())
    if (!sites.includes(site)) {
      sites.push(site);
      names.push(document.heads.name[head]!.replace(/\.[^.]*$/, ""));
    }
  return {
    place: document.heads.site.map((site) => sites.indexOf(site)),
    count: sites.length,
    names,
    colour: (place) => colours.ramp(0.22 + (0.74 * place) / Math.max(1, sites.length - 1)),
  };
}

/** The colours of the layers in a row, with the names of the first and the last ones. */
export function layerLegend(layers: Layers, label: string, x: number, y: number): SVGGElement {
  const each = Math.max(5, Math.min(20, 220 / layers.count));
  const group = svg("g", { transform: `translate(${x},${y})`, class: "legend" }, svg("text", { x: 0, y: 10, class: "soft" }, label));
  const start = 12 * [...label].reduce((sum, letter) => sum + (letter.charCodeAt(0) > 0x2e80 ? 1 : 0.55), 0) + 10;
  const labelled = new Set(layers.count * each < 26 * layers.count && layers.count > 12 ? [0, layers.count - 1] : layers.names.keys());
  for (const [i, name] of layers.names.entries()) {
    group.append(svg("rect", { x: start + i * each, y: 0, width: each - 1, height: 12, fill: layers.colour(i) }));
    if (labelled.has(i) && name.length <= 3)
      group.append(svg("text", { x: start + (i + 0.5) * each, y: 25, "text-anchor": "middle", class: "tiny" }, name));
  }
  return group;
}
