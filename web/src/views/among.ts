// What views of pictures and of alignments share: which example they show, and which of its heads.
import { exampleChoice } from "../draw/examples";
import { html } from "../draw/element";
import type { Example, HeadDocument } from "../document";
import type { Page } from "../page";
import { current } from "../state";

export interface Among {
  example: Example;
  /** the list of examples that this view can show, if there are several */
  choices: HTMLElement;
  close: () => void;
}

/** The chosen example if it has what the view needs, or the first that has. Another choice draws the view again. */
export function among(page: Page, has: (example: Example) => boolean): Among {
  const { examples } = page.document;
  const indexes = [...examples.keys()].filter((index) => has(examples[index]!));
  const index = indexes.includes(page.state.now.example) ? page.state.now.example : indexes[0]!;
  const choices = html("div", { class: "choices" });
  if (indexes.length > 1) choices.append(exampleChoice(page, indexes, index));
  return { example: examples[index]!, choices, close: page.state.subscribe(() => page.redraw(), "example") };
}

/** The layers, each with those of its heads that are shown; layers without any are left out. */
export function layersOf(document: HeadDocument, shown: (head: number) => boolean): { layer: number; heads: number[] }[] {
  return document.stacks
    .flatMap((stack) => stack.layers)
    .map(({ layer, heads }) => ({ layer, heads: heads.filter(shown) }))
    .filter(({ heads }) => heads.length);
}

/** The head that was picked last, if the view shows it, or else the one it would choose. */
export function headAmong(page: Page, shown: (head: number) => boolean, otherwise: () => number): number {
  const { now } = page.state;
  return now.selected.length && shown(current(now)) ? current(now) : otherwise();
}
