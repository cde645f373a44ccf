// Words of the pipeline, of all heads, of pictures and of alignments, in English.

export const views = {
  example: "Example",
  pictureNumber: (number: number) => `Image ${number}`,
  label: (label: string) => `label: ${label}`,

  pipeline: {
    lead: (heads: number, layer: string) =>
      `How multi-head attention works, on one sentence: every coloured cell is a number of this model (layer ${layer}, ${heads} heads). Hover over a cell to read it; follow a word, or choose a head.`,
    chooseToken: "Follow",
    chooseHead: "Head",
    head: "head",
    ids: "id",
    lookUp: "look up",
    sum: "sum, norm",
    channel: (index: number) => `channel ${index}`,
    matrices: {
      embedding: "word vectors E",
      positions: "positions P",
      input: "input X",
      query: "queries",
      key: "keys",
      value: "values",
      weights: "attention weights",
      heads: "output of head",
      joined: "heads side by side",
      projected: "output Y",
    } as Record<string, string>,
    meaning: {
      query: "what a word looks for",
      key: "what it can be found by",
      value: "what it passes on",
    } as Record<string, string>,
    steps: {
      vectors: {
        title: "From words to vectors",
        note: "The text is split into tokens. Each token has a number (id) in the vocabulary, and each id has a learned vector, its embedding. A second vector for the position is added, because attention by itself ignores the order of tokens.",
      },
      projections: {
        title: "Queries, keys and values of every head",
        note: "Each head multiplies the input by three small matrices of its own. So every head has its own queries, keys and values; each is a slice of the model's width.",
      },
      attention: {
        title: "One head attends",
        note: "The query of a word (a row) is compared with the keys of all words. Softmax turns each row into weights that sum to 1: the attention weights. The output is the average of the values with these weights.",
      },
      heads: {
        title: "All heads at once, each in its own way",
        note: "The same words, at the same time, in every head. Rows are queries, columns are keys; the stronger the colour, the larger the weight (each head up to its largest). Choose a head to see it above.",
      },
      joined: {
        title: "Concatenated, and mixed",
        note: "The outputs of the heads are concatenated, which gives the model's width again. One last matrix, the output projection, mixes them. This is the output of multi-head attention.",
      },
    },
    reading: (word: string, head: string, keys: string) => `In head ${head}, ${word} attends most to ${keys}.`,
  },

  all: {
    layer: "layer",
    nothing: "This report has no comparison of heads: it was written from a table alone.",
    space: {
      title: "Heads by distance",
      note: "Heads with similar attention are close together (the distances between all heads, scaled to two dimensions). The stronger the colour of a point, the deeper its layer; shaded areas are clusters; a line joins a head to its twin, the head most like it: the stronger, the nearer.",
      label: (head: string, cluster: string, twin: string, distance: string) =>
        `Head ${head}${cluster ? `, ${cluster.toLowerCase()}` : ""}${twin ? `; twin ${twin} at distance ${distance}` : ""}`,
    },
    similarity: {
      title: "Every pair of heads",
      note: "Distance between what two heads attend to (0: the same, 1: nothing in common). Heads are ordered by cluster; a block on the diagonal is a group of similar heads.",
      same: "alike",
      different: "different",
      pair: (a: string, b: string, distance: string) => `${a} and ${b}: distance ${distance}`,
    },
    depth: {
      title: "Layer by layer",
      note: "Each small dot is a head, the line is the mean of its layer. Diversity is the mean distance between the heads of one layer.",
      titles: {
        entropy: "Entropy (nats)",
        distance: "Distance (tokens)",
        diversity: "Diversity (mean distance)",
      } as Record<string, string>,
      layer: (layer: string) => `Layer ${layer}, mean`,
      head: (head: string) => `Head ${head}`,
    },
    pruning: {
      title: "Quality as heads are silenced",
      note: "Heads are silenced, the least important first. The line of a good ranking stays above that of random heads (band: one standard error of the change). Nothing is refitted or trained here: manyheads prune loses less.",
      noteLess: "Heads are silenced, the least important first. The line of a good ranking stays below that of random heads (band: one standard error of the change; lower is better). Nothing is refitted or trained here: manyheads prune loses less.",
      kept: "heads kept",
      random: "at random",
      quality: {
        cosine: "cosine to the full model's output",
        perplexity: "perplexity",
        agreement: "share of predictions that stay the same",
        accuracy: "accuracy",
        "exact match": "exact matches",
        "word error rate": "word error rate",
        "squared error": "mean squared error",
        "squared change": "mean squared change of the output",
      } as Record<string, string>,
      measured: (sequences: number) => ` Measured on ${sequences === 1 ? "one sequence, so there is no standard error" : `${sequences} sequences`}.`,
      at: (kept: string, quality: string, value: string) => `${kept} of heads kept, ${quality} ${value}`,
    },
  },

  picture: {
    nothing: "This report has no exact attention for its images.",
    one: "What a patch attends to",
    oneNote: "Click a patch, or use the arrow keys: the image glows where this patch attends to, in the chosen head.",
    received: "Attention that each patch receives",
    inHead: "in this head",
    rollout: "all layers (rollout)",
    receivedNote: (head: string, outside: string) => `Mean over all queries in head ${head}: where the image glows, many tokens attend. ${outside} goes to tokens that are not patches.`,
    rolloutFrom: (query: string) => `From the ${query}, through all layers.`,
    every: "The same patch in every head",
    everyNote: "Rows are layers, columns are heads; each glows up to its largest weight. Click a head to enlarge it.",
    query: "Query",
    patches: "Patches of the image",
    patch: "a patch",
    classToken: "class token",
    register: (index: number) => `token ${index}`,
    place: (row: number, column: number) => `patch in row ${row}, column ${column}`,
    scale: "attention, from 0 to the largest",
    peak: (share: string) => `largest weight ${share}`,
    reading: (head: string, query: string, self: string, outside: string) =>
      `In head ${head}, the ${query} keeps ${self} of its attention to itself${outside ? `; ${outside} goes to tokens that are not patches` : ""}.`,
  },

  alignment: {
    nothing: "This report has no exact cross-attention.",
    show: "Show",
    modes: { head: "one head", layer: "mean of its layer", all: "mean of all heads" },
    layer: (layer: number) => `mean of layer ${layer}`,
    lines: "From source to target",
    linesNote: "The source is above, the target below. The stronger a line, the more the decoder attends to that source word when it has read the target word and predicts the next. Hover over a word, or choose one with the arrow keys.",
    matrix: "Alignment matrix",
    matrixNote: "Rows: target. Columns: source. Each row sums to 100%.",
    every: "Every cross-attention head",
    everyNote: "Rows are layers, columns are heads. Click one to see it above.",
    source: "source",
    target: "target",
    choose: (what: string) => `Shown: ${what}. Hover over a target word to see what it attends to.`,
    reading: (word: string, most: string, what: string) => `${word} attends most to ${most} (${what}).`,
  },
};
