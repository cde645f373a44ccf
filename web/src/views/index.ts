// The views in the order of their tabs. A view fills its root, and may return what to undo when it is left.
import type { Page } from "../page";
import type { Words } from "../words";
import { all } from "./all";
import { alignment } from "./alignment";
import { glance } from "./glance";
import { head } from "./head";
import { heads } from "./heads";
import { live } from "./live";
import { picture } from "./picture";
import { pipeline } from "./pipeline";

export type View = (root: HTMLElement, page: Page) => void | (() => void);

export interface Tab {
  name: keyof Words["tabs"];
  view: View;
  /** whether this document has something for it */
  has(page: Page): boolean;
}

export const tabs: Tab[] = [
  { name: "live", view: live, has: (page) => page.live !== undefined },
  { name: "heads", view: heads, has: () => true },
  { name: "glance", view: glance, has: (page) => page.document.examples.length > 0 },
  { name: "head", view: head, has: () => true },
  { name: "all", view: all, has: (page) => page.document.heads.name.length > 1 },
  { name: "pipeline", view: pipeline, has: (page) => page.document.examples.some((example) => example.pipeline) },
  { name: "picture", view: picture, has: (page) => page.document.examples.some((example) => example.picture) },
  {
    name: "alignment",
    view: alignment,
    has: (page) => page.document.examples.some((example) => example.maps.some((map) => map.queries !== map.keys)),
  },
];
