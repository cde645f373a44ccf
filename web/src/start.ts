// The page's entry: reads the document that the HTML file carries and shows it.
// The HTML needs <div id="page"></div> and <script type="application/octet-stream" id="document">...</script>; the live
// page has <meta name="manyheads-live"> with its token instead of a document.
import "./styles/index.css";
import { inflate } from "./document";
import { html } from "./draw/element";
import { startLive } from "./live";
import { show } from "./page";

async function start(): Promise<void> {
  const root = document.getElementById("page") ?? document.body.appendChild(html("div", { id: "page" }));
  document.body.classList.add("manyheads-body");
  root.setAttribute("role", "main");
  try {
    const token = document.querySelector<HTMLMetaElement>('meta[name="manyheads-live"]');
    if (token) {
      await startLive(root, token.content, (place, known, live) => show(place, known, { remember: true, live }));
      return;
    }
    const carried = document.getElementById("document")?.textContent;
    if (!carried) throw new Error("this file carries no document");
    show(root, await inflate(carried), { remember: true });
  } catch (error) {
    root.replaceChildren(html("p", { role: "alert" }, `This page cannot be shown: ${String(error)}`));
    throw error;
  }
}

void start();
