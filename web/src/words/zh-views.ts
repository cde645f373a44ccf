import type { views as english } from "./en-views";

export const views: typeof english = {
  example: "示例",

  pipeline: {
    lead: (heads, layer) =>
      `用一个句子看懂多头注意力：每个彩色格子都是该模型的一个真实数值（第 ${layer} 层，${heads} 个头）。指向格子可读出数值；也可以跟随一个词，或选择一个头。`,
    chooseToken: "跟随",
    chooseHead: "头",
    head: "头",
    ids: "编号",
    lookUp: "查表",
    sum: "相加、归一",
    channel: (index) => `通道 ${index}`,
    matrices: {
      embedding: "词向量 E",
      positions: "位置 P",
      input: "输入 X",
      query: "查询",
      key: "键",
      value: "值",
      weights: "注意力权重",
      heads: "头的输出",
      joined: "各头拼接",
      projected: "输出 Y",
    },
    meaning: {
      query: "这个词在找什么",
      key: "凭什么被找到",
      value: "交出什么内容",
    },
    steps: {
      vectors: {
        title: "从词到向量",
        note: "文本被切分为词元。每个词元在词表中有一个编号，每个编号对应一个学到的向量。词元所在的位置作为第二个向量相加，因为注意力本身不知道先后顺序。",
      },
      projections: {
        title: "每个头对每个词的三种视角",
        note: "每个头用自己的三个小矩阵去乘输入，于是每个头都有自己的查询、键和值：它们很窄，只是模型宽度的一份。",
      },
      attention: {
        title: "一个头怎样看",
        note: "一个词的查询（一行）与所有词的键作比较。softmax 把每一行变成总和为 1 的份额，这就是注意力权重；再按这些份额对值求平均。",
      },
      heads: {
        title: "所有头同时看，各看各的",
        note: "同样的词，同一时刻，在每一个头里。行是提问者，列是回答者；颜色越强，权重越大（各头以自身最大值为准）。选择一个头，即可在上方细看。",
      },
      joined: {
        title: "并排拼接，再混合",
        note: "各头的输出并排拼接，又恢复到模型的宽度。最后一个矩阵把各头的发现混合起来，这就是多头注意力的输出。",
      },
    },
    reading: (word, head, keys) => `在头 ${head} 中，${word} 最关注 ${keys}。`,
  },
};
