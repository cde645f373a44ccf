import type { views as english } from "./en-views";

export const views: typeof english = {
  example: "示例",
  pictureNumber: (number) => `图像 ${number}`,

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
        note: "每个头用自己的三个小矩阵去乘输入，于是每个头都有自己的查询、键和值：它们很窄，只占模型宽度的一小份。",
      },
      attention: {
        title: "一个头怎样看",
        note: "一个词的查询（一行）与所有词的键作比较。softmax 把每一行变成总和为 1 的份额，这就是注意力权重；再按这些份额对值求平均。",
      },
      heads: {
        title: "所有头同时看，各看各的",
        note: "同样的词，同一时刻，在每一个头里。行是提问者，列是回答者；颜色越深，权重越大（各头以自身最大值为准）。选择一个头，即可在上方细看。",
      },
      joined: {
        title: "并排拼接，再混合",
        note: "各头的输出并排拼接，又恢复到模型的宽度。最后一个矩阵把各头的发现混合起来，这就是多头注意力的输出。",
      },
    },
    reading: (word, head, keys) => `在头 ${head} 中，${word} 最关注 ${keys}。`,
  },

  all: {
    layer: "层",
    nothing: "本报告没有头之间的比较：它只由一张表生成。",
    space: {
      title: "按距离排布的头",
      note: "注意力相似的头彼此靠近（由所有头两两距离得到的二维图）。点的颜色越深，所在的层越靠后；阴影区域是同一类的头；线把每个头与它的孪生头（最相似的头）相连，线越深，距离越近。",
      label: (head, cluster, twin, distance) => `头 ${head}${cluster ? `，${cluster}` : ""}${twin ? `；孪生头 ${twin}，距离 ${distance}` : ""}`,
    },
    similarity: {
      title: "每一对头",
      note: "两个头的注意力之间的距离（0：完全相同，1：毫无共同之处）。头按类排序；对角线上的方块是一组做同样事情的头。",
      same: "相似",
      different: "不同",
      pair: (a, b, distance) => `${a} 与 ${b}：距离 ${distance}`,
    },
    depth: {
      title: "逐层变化",
      note: "每个小点是一个头，折线是该层的平均值。多样性是同一层各头之间的平均距离。",
      titles: {
        entropy: "熵（奈特）",
        distance: "距离（词元）",
        diversity: "多样性（平均距离）",
      },
      layer: (layer) => `第 ${layer} 层平均`,
      head: (head) => `头 ${head}`,
    },
    pruning: {
      title: "去掉头之后还剩多少",
      note: "从最不重要的头开始逐步消融。排序若有价值，它的曲线应高于随机去头的曲线（阴影带：变化量的一个标准误）。这里不做任何训练或重新拟合；manyheads prune 的效果更好。",
      noteLess: "从最不重要的头开始逐步消融。排序若有价值，它的曲线应低于随机去头的曲线（阴影带：变化量的一个标准误；困惑度越低越好）。这里不做任何训练或重新拟合；manyheads prune 的效果更好。",
      kept: "保留的头",
      random: "随机",
      quality: {
        cosine: "与完整模型输出的余弦",
        perplexity: "困惑度",
        agreement: "选择保持不变的比例",
        accuracy: "准确率",
      },
      measured: (sequences) => (sequences === 1 ? "仅在一个序列上测得，因此没有标准误。" : `在 ${sequences} 个序列上测得。`),
      at: (kept, quality, value) => `保留 ${kept} 的头，${quality} ${value}`,
    },
  },

  picture: {
    nothing: "本报告没有保存图像的精确注意力。",
    one: "一个图块在看哪里",
    oneNote: "点击一个图块，或用方向键移动：在所选的头里，该图块看向哪里，哪里就发亮。",
    every: "同一图块在每个头中",
    everyNote: "行是层，列是头；每个头以自身的最大权重为准。点击一个头即可放大查看。",
    query: "由谁来看",
    patches: "图像的图块",
    patch: "图块",
    classToken: "类别词元",
    register: (index) => `词元 ${index}`,
    place: (row, column) => `第 ${row} 行第 ${column} 列的图块`,
    scale: "注意力，从 0 到最大",
    peak: (share) => `最大权重 ${share}`,
    reading: (head, query, self, outside) => `在头 ${head} 中，${query}把 ${self} 的注意力留给自己${outside ? `；${outside} 给了不是图块的词元` : ""}。`,
  },

  alignment: {
    nothing: "本报告没有保存精确的交叉注意力。",
    show: "显示",
    modes: { head: "单个头", layer: "所在层的平均", all: "所有头的平均" },
    layer: (layer) => `第 ${layer} 层的平均`,
    lines: "从源句到目标句",
    linesNote: "上面是源句，下面是目标句。线越深，解码器读完该目标词、将要写下一个词时，对该源词的关注越多。指向一个词，或用方向键选择。",
    matrix: "对齐矩阵",
    matrixNote: "行：目标句。列：源句。每行总和为 100%。",
    every: "每个交叉注意力头",
    everyNote: "行是层，列是头。点击一个头即可在上方查看。",
    source: "源句",
    target: "目标句",
    choose: (what) => `当前显示：${what}。指向一个目标词，看它关注哪里。`,
    reading: (word, most, what) => `${word} 最关注 ${most}（${what}）。`,
  },
};
