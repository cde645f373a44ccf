// Every word of the interface, in English. words/zh.ts must have the same keys. Groups belong to the files that use them.

export const en = {
  language: "English",
  tag: "en",

  // page.ts
  languageLabel: "Language",
  theme: "Theme",
  themes: { auto: "Auto", light: "Light", dark: "Dark" },
  views: "Views",
  tabs: {
    live: "Live",
    heads: "Head map",
    glance: "All maps",
    head: "One head",
    all: "All heads",
    pipeline: "Pipeline",
    picture: "Picture",
    alignment: "Alignment",
  },
  units: { tokens: "tokens", patches: "patches", images: "images" } as Record<string, string>,
  summary: (layers: number, heads: number, units: string, unit: string, corpus: string) =>
    `${layers} layers, ${heads} heads · measured on ${units} ${unit} of ${corpus}`,
  fingerprint: "model",
  selected: (head: string) => `Head ${head} selected`,

  // draw/chart.ts
  save: "Save this chart",
  saveSvg: "Save as SVG",
  savePng: "Save as PNG",
  saveCsv: "Save its numbers as CSV",
};
