// The page's entry: reads the document that the HTML file carries and shows it.
// The HTML needs <div id="page"></div> and <script type="application/octet-stream" id="document">...</script>.
import "./styles/index.css";
import { inflate } from "./document";
import { html } from "./draw/element";
import type { Live } from "./live";
import { show } from "./page";

declare global {
  interface Window {
    manyheads?: { live?: Live };
  }
}

async function start(): Promise<void> {
  const root = document.getElementById("page") ?? document.body.appendChild(html("div", { id: "page" }));
  document.body.classList.add("manyheads-body");
  try {
    const carried = document.getElementById("document")?.textContent;
    if (!carried) throw new Error("this file carries no document");
    const live = window.manyheads?.live;
    show(root, await inflate(carried), { remember: true, ...(live ? { live } : {}) });
  } catch (error) {
    root.replaceChildren(html("p", { role: "alert" }, `This page cannot be shown: ${String(error)}`));
    throw error;
  }
}

void start();
