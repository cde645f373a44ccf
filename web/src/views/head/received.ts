// What each token receives: in the head, in its layer on average, or through all layers (rollout).
import { chart } from "../../draw/chart";
import { ink } from "../../draw/colour";
import { html, svg } from "../../draw/element";
import { percent } from "../../draw/number";
import { fit, plain, textWidth } from "../../draw/tokens";
import type { Attention } from "../../maps";
import type { Page } from "../../page";
import { layerMean, received, rollout, rowMean } from "../../rollout";

type Mode = "head" | "layer" | "rollout";
const MOST = 400; // tokens that are drawn
const ROW = 44;

export function receives(page: Page, head: number, seen: Attention, name: string, width: number): HTMLElement {
  const { document, state, words, colours } = page;
  const example = document.examples[state.now.example]!;
  const { keys, queries } = seen;
  let mode: Mode = "head";
  let query = -1;
  let shares = received(seen, query);
  const causal = document.heads.kind[head] === "causal" ? words.receivedCausal : "";
  const figure = chart({
    title: words.received,
    name: `${name}-received`,
    words,
    rows: () => [["token", "text", "share"], ...keys.map((token, at) => [at, token.text, Number((shares[at] ?? 0).toPrecision(5))])],
  });
  const note = html("p", { class: "note" });
  figure.body.before(note);
  const layer = document.stacks.flatMap((stack) => stack.layers).find((one) => one.site === document.heads.site[head])!;
  const ways = html("select", { "data-control": "received", onchange: () => ((mode = ways.value as Mode), draw()) });
  for (const [value, text] of Object.entries(words.receivedModes)) ways.append(html("option", { value }, text));
  const from = html("select", { "data-control": "from", onchange: () => ((query = Number(from.value)), draw()) });
  from.append(html("option", { value: -1 }, words.everyQuery));
  queries.slice(0, MOST).forEach((token, at) => from.append(html("option", { value: at }, `${plain(token)} #${at}`)));
  const labelled = (text: string, select: HTMLElement) => html("label", { class: "choice" }, html("span", { class: "label" }, text), select);
  figure.controls.append(labelled(words.receivedBy, ways), labelled(words.receivedFrom, from));

  /** The shares, or why there are none. */
  function compute(): string {
    if (mode === "head") shares = received(seen, query);
    else {
      const weights = mode === "layer" ? (layerMean(document, example, layer) ?? "exact") : rollout(document, example, head);
      if (typeof weights === "string") {
        shares = [];
        return words.noRollout(words.rolloutMissing[weights]);
      }
      shares = rowMean(weights, query);
    }
    return [words.receivedNote, query < 0 ? causal : "", mode === "rollout" ? words.rolloutNote : ""].filter(Boolean).join(" ");
  }

  function draw(): void {
    note.textContent = compute();
    const most = Math.max(1e-9, ...shares);
    const drawing = svg("svg", { class: "received", role: "group", "aria-label": words.received });
    let [x, y] = [0, 0];
    shares.slice(0, MOST).forEach((share, at) => {
      const token = keys[at]!;
      const { prefix, text } = fit(token, Math.min(160, width - 20));
      const size = Math.ceil(Math.max(textWidth(prefix + text, 13), textWidth(percent(share), 10.5)) + 12);
      if (x && x + size > width) [x, y] = [0, y + ROW];
      const colour = colours.ramp(share / most);
      drawing.append(
        svg(
          "g",
          { "data-token": at, "data-value": share, role: "img", "aria-label": `${plain(token)}: ${percent(share)}` },
          svg("title", {}, `${plain(token)}: ${percent(share)}`),
          svg("rect", { x, y: y + 1, width: size, height: 22, rx: 4, fill: colour }),
          svg("text", { x: x + size / 2, y: y + 16, "text-anchor": "middle", style: `font-size:13px;fill:${ink(colour)}` }, prefix + text),
          svg("text", { x: x + size / 2, y: y + 36, "text-anchor": "middle", class: "tiny" }, percent(share)),
        ),
      );
      x += size + 3;
    });
    const height = shares.length ? y + ROW : 20;
    drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
    drawing.setAttribute("width", String(width));
    drawing.setAttribute("height", String(height));
    figure.body.replaceChildren(drawing);
  }

  draw();
  return figure.figure;
}
