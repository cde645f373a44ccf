// A chart as a file: SVG with its styles inside, PNG at twice the size, and its numbers as CSV.
import { svg } from "./element";
import { under } from "./pixels";

export type Cell = string | number | null | undefined;

const STYLES = [
  "fill", "fill-opacity", "stroke", "stroke-width", "stroke-opacity", "stroke-dasharray", "stroke-linecap",
  "stroke-linejoin", "opacity", "font-family", "font-size", "font-weight", "font-style", "text-anchor",
  "dominant-baseline", "letter-spacing", "visibility", "display", "image-rendering", "paint-order",
]; // prettier-ignore

/** Those of STYLES that an element does not take from its parent, with what they are if nobody says. */
const OWN: Record<string, string> = { opacity: "1", display: "inline" };

/** The chart as a document of its own: what CSS gave it is written onto its elements. */
export function standalone(chart: SVGSVGElement): string {
  const copy = chart.cloneNode(true) as SVGSVGElement;
  const originals = [chart, ...chart.querySelectorAll<SVGElement>("*")];
  const copies = [copy, ...copy.querySelectorAll<SVGElement>("*")];
  for (const [i, original] of originals.entries()) {
    const style = getComputedStyle(original);
    const above = i > 0 ? getComputedStyle(original.parentElement!) : null;
    const parts = STYLES.filter((property) => {
      const value = style.getPropertyValue(property);
      return value !== (property in OWN ? OWN[property] : above?.getPropertyValue(property));
    }).map((property) => `${property}:${style.getPropertyValue(property)}`);
    const target = copies[i]!;
    for (const { name } of [...target.attributes])
      if (/^(class|style|tabindex|role|aria-.*)$/.test(name)) target.removeAttribute(name);
    if (parts.length) target.style.cssText = parts.join(";"); // not as an attribute, which the live page forbids
  }
  for (const hidden of copy.querySelectorAll("[data-screen-only]")) hidden.remove();
  const box = chart.viewBox.baseVal;
  const ground = document.createElementNS("http://www.w3.org/2000/svg", "rect");
  const sizes = { width: box.width || chart.clientWidth, height: box.height || chart.clientHeight };
  for (const [name, size] of Object.entries(sizes)) {
    copy.setAttribute(name, String(size));
    ground.setAttribute(name, String(size));
  }
  ground.setAttribute("fill", getComputedStyle(chart).getPropertyValue("--surface").trim() || "#ffffff");
  const painted = under.get(chart);
  if (painted) copy.prepend(svg("image", { ...sizes, href: painted() }));
  copy.prepend(ground);
  return new XMLSerializer().serializeToString(copy);
}

/** The chart as PNG, twice as large as on the page. */
export async function png(chart: SVGSVGElement, scale = 2): Promise<Blob> {
  const source = standalone(chart);
  const image = new Image();
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(source);
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = Math.ceil(image.width * scale);
  canvas.height = Math.ceil(image.height * scale);
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((resolve, reject) =>
    canvas.toBlob((blob) => (blob ? resolve(blob) : reject(new Error("the chart is too large for a PNG"))), "image/png"),
  );
}

/** Rows as CSV (RFC 4180), the first row being the names. A text that a spreadsheet would run as a formula gets a quote. */
export function csv(rows: Cell[][]): string {
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

function cell(value: Cell): string {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return Number.isFinite(value) ? String(value) : "";
  value = value.replaceAll("\0", "␀"); // at which many readers of CSV stop
  const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : value;
  return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

/** Hands a file to the person. */
export function download(name: string, content: Blob | string, type = "text/plain"): void {
  const blob = content instanceof Blob ? content : new Blob([content], { type: `${type};charset=utf-8` });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.hidden = true;
  document.body.append(link); // a link outside the document may be collected before the browser has read it
  link.click();
  setTimeout(() => {
    URL.revokeObjectURL(link.href);
    link.remove();
  }, 60_000);
}
