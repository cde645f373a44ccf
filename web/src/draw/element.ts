// Elements without a framework. Text always arrives through text nodes, so nothing from a corpus becomes markup.

type Value = string | number | boolean | null | undefined | ((event: never) => void);
export type Attributes = Record<string, Value>;
export type Child = Node | string | number | null | undefined | false;

const SVG = "http://www.w3.org/2000/svg";

function fill(element: Element, attributes: Attributes, children: Child[]): void {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(name.slice(2), value as EventListener);
    // the live page's Content-Security-Policy forbids style attributes, and lets scripts set styles
    else if (name === "style") (element as HTMLElement | SVGElement).style.cssText = String(value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** An HTML element: html("button", {type: "button", onclick: go}, "Go"). */
export function html<K extends keyof HTMLElementTagNameMap>(
  name: K,
  attributes: Attributes = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(name);
  fill(element, attributes, children);
  return element;
}

/** An SVG element: svg("rect", {x: 1, y: 2, width: 3, height: 4}). */
export function svg<K extends keyof SVGElementTagNameMap>(
  name: K,
  attributes: Attributes = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  const element = document.createElementNS(SVG, name);
  fill(element, attributes, children);
  return element;
}

let count = 0;

/** An id that no other element of the page has (several widgets may share one page). */
export function unique(stem: string): string {
  return `manyheads-${stem}-${++count}`;
}
