import type { Words } from "./index";

export const zh: Words = {
  language: "中文",
  tag: "zh-CN",

  // page.ts
  languageLabel: "语言",
  theme: "主题",
  themes: { auto: "自动", light: "浅色", dark: "深色" },
  views: "视图",
  tabs: {
    live: "实时",
    heads: "头图",
    glance: "全部注意力图",
    head: "单个头",
    all: "所有头",
    pipeline: "计算流程",
    picture: "图像",
    alignment: "对齐",
  },
  units: { tokens: "个词元", patches: "个图块", images: "张图像" },
  summary: (layers, heads, units, unit, corpus) => `${layers} 层，${heads} 个头 · 在 ${corpus} 的 ${units} ${unit}上测得`,
  fingerprint: "模型",
  selected: (head) => `已选择头 ${head}`,

  // draw/chart.ts
  save: "保存此图",
  saveSvg: "保存为 SVG",
  savePng: "保存为 PNG",
  saveCsv: "将数据保存为 CSV",
};
