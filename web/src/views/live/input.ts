// What the model is to read: a text that is typed, or a picture that is dropped.
import { html, unique } from "../../draw/element";
import { shorten } from "../../draw/tokens";
import type { Bench, Part } from "../live";

const CHARACTERS = 100_000;
const SAMPLES = 8; // pictures to try

export function input(bench: Bench): Part {
  return bench.live.progress.reads === "text" ? text(bench) : picture(bench);
}

function text(bench: Bench): Part {
  const { live, page } = bench;
  const words = page.words.live;
  const { mask, samples } = live.progress;
  const id = unique("text");
  const area = html("textarea", {
    id,
    rows: 2,
    maxlength: CHARACTERS,
    spellcheck: "false",
    dir: "auto",
    placeholder: mask ? words.hintMask(mask) : words.hint,
    oninput: () => {
      live.input = { text: area.value };
      grow();
      bench.ask();
    },
  });
  const grow = () => {
    area.style.height = "auto";
    area.style.height = `${Math.min(240, area.scrollHeight + 2)}px`;
  };
  if (live.input && "text" in live.input) area.value = live.input.text;
  const tries = html(
    "div",
    { class: "chips", role: "group", "aria-label": words.samples },
    ...samples.map((sample) =>
      html(
        "button",
        {
          type: "button",
          class: "chip",
          title: sample,
          onclick: () => {
            area.value = sample;
            live.input = { text: sample };
            grow();
            bench.ask();
          },
        },
        html("bdi", {}, shorten(sample, 44)),
      ),
    ),
  );
  const state = status(bench);
  const element = html("section", { class: "chart ask" }, html("label", { for: id }, words.text), area, state.element, samples.length ? tries : null);
  requestAnimationFrame(grow);
  return { element, update: state.update };
}

function picture(bench: Bench): Part {
  const { live, page } = bench;
  const words = page.words.live;
  const shown = html("img", { class: "dropped", alt: "" });
  const file = html("input", { type: "file", accept: "image/png,image/jpeg,image/webp,image/gif,image/bmp", "aria-label": words.choosePicture, onchange: () => void take(file.files?.[0]) });
  const zone = html("div", { class: "drop" }, shown, html("p", {}, words.drop), file);
  async function take(chosen: File | undefined): Promise<void> {
    if (!chosen) return;
    const data = await new Promise<string>((done, failed) => {
      const reader = new FileReader();
      reader.onload = () => done(String(reader.result));
      reader.onerror = () => failed(reader.error);
      reader.readAsDataURL(chosen);
    });
    live.input = { image: data.slice(data.indexOf(",") + 1) };
    bench.ask();
  }
  zone.addEventListener("dragover", (event) => {
    event.preventDefault();
    zone.classList.add("over");
  });
  zone.addEventListener("dragleave", () => zone.classList.remove("over"));
  zone.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    void take(event.dataTransfer?.files[0]);
  });
  const tries = html(
    "div",
    { class: "chips", role: "group", "aria-label": words.samples },
    ...Array.from({ length: Math.min(SAMPLES, live.progress.pictures) }, (_, sample) =>
      html("button", { type: "button", class: "chip", onclick: () => ((live.input = { sample }), bench.ask()) }, page.words.pictureNumber(sample + 1)),
    ),
  );
  const state = status(bench);
  const missing = live.progress.stages.length ? null : html("p", { class: "note" }, words.noPictures);
  return {
    element: html("section", { class: "chart ask" }, zone, state.element, live.progress.pictures ? tries : null, missing),
    update() {
      state.update();
      const png = live.attended?.example.picture?.png;
      shown.hidden = !png;
      if (png && shown.src !== png) shown.src = png;
    },
  };
}

/** How long it is and how long it took, or what is wrong. */
function status(bench: Bench): Part {
  const { live, page } = bench;
  const words = page.words.live;
  const says = html("span", { "data-part": "status" });
  const wrong = html("p", { class: "wrong", role: "alert" });
  const again = html("button", { type: "button", onclick: () => bench.ask() }, words.again);
  const element = html("div", { class: "status" }, says, wrong, again);
  return {
    element,
    update() {
      const example = live.attended?.example;
      const tokens = example ? Math.max(0, ...Object.values(example.tokens).map((axis) => axis.length)) : 0;
      const cut = live.attended?.cut;
      const unknown = example ? Object.values(example.tokens).flat().filter((token) => token.mark === "unknown").length : 0;
      const parts = [
        tokens ? words.tokens(tokens) : "",
        unknown ? words.unknown(unknown) : "",
        bench.took === null ? words.asking : bench.took ? words.took(bench.took) : "",
        cut ? words.cut(cut.shown, cut.tokens) : "",
      ];
      says.textContent = bench.error ? "" : parts.filter(Boolean).join(" · ");
      wrong.textContent = bench.error;
      wrong.hidden = !bench.error;
      again.hidden = bench.error !== words.lost;
      element.dataset["took"] = String(bench.took ?? "");
    },
  };
}
