// Words of the pipeline, of all heads, of pictures and of alignments, in English.

export const views = {
  example: "Example",
  pictureNumber: (number: number) => `Picture ${number}`,

  pipeline: {
    lead: (heads: number, layer: string) =>
      `How multi-head attention works, on one sentence: every coloured cell is a number of this model (layer ${layer}, ${heads} heads). Point at a cell to read it; follow a word, or choose a head.`,
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
      value: "what it hands over",
    } as Record<string, string>,
    steps: {
      vectors: {
        title: "From words to vectors",
        note: "The text is split into tokens. Each has a number (id) in the vocabulary, and each id a learned vector. Where the token stands is added as a second vector, because attention by itself does not know any order.",
      },
      projections: {
        title: "Three views of every word, for each head",
        note: "Each head multiplies the input by three small matrices of its own. So every head gets its own queries, keys and values: narrow ones, a slice of the model's width.",
      },
      attention: {
        title: "One head looks",
        note: "The query of a word (a row) is compared with the keys of all words. Softmax turns each row into shares that sum to 1: the attention weights. With these shares, the values are averaged.",
      },
      heads: {
        title: "All heads look at once, each in its own way",
        note: "The same words, at the same time, in every head. Rows ask, columns answer; the stronger the colour, the larger the weight (each head by its own largest). Choose a head to see it above.",
      },
      joined: {
        title: "Put side by side, and mixed",
        note: "The heads' outputs are put side by side, which gives the model's width again. One last matrix mixes what the heads found. This is the output of multi-head attention.",
      },
    },
    reading: (word: string, head: string, keys: string) => `In head ${head}, ${word} looks most at ${keys}.`,
  },

  all: {
    layer: "layer",
    nothing: "This report holds no comparison of heads: it was made from a table alone.",
    space: {
      title: "Heads by distance",
      note: "Heads that attend alike lie together (two dimensions of the distances between all of them). The stronger the colour of a point, the deeper its layer; shaded areas are clusters; a line joins a head to its twin, the head most like it: the stronger, the nearer.",
      label: (head: string, cluster: string, twin: string, distance: string) =>
        `Head ${head}${cluster ? `, ${cluster.toLowerCase()}` : ""}${twin ? `; twin ${twin} at distance ${distance}` : ""}`,
    },
    similarity: {
      title: "Every pair of heads",
      note: "Distance between what two heads attend to (0: the same, 1: nothing in common). Heads are ordered by cluster; a block on the diagonal is a group of heads that do the same.",
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
      title: "What is left when heads go",
      note: "Heads are silenced, the least important first. If a ranking is worth anything, its line stays above that of heads chosen at random (band: one standard error of the change). Nothing is trained or refitted here: manyheads prune gets further.",
      noteLess: "Heads are silenced, the least important first. If a ranking is worth anything, its line stays below that of heads chosen at random (band: one standard error of the change; a lower perplexity is better). Nothing is trained or refitted here: manyheads prune gets further.",
      kept: "heads kept",
      random: "at random",
      quality: {
        cosine: "cosine to the full model's output",
        perplexity: "perplexity",
        agreement: "share of choices that stay the same",
        accuracy: "accuracy",
      } as Record<string, string>,
      measured: (sequences: number) => ` Measured on ${sequences === 1 ? "one sequence, so there is no standard error" : `${sequences} sequences`}.`,
      at: (kept: string, quality: string, value: string) => `${kept} of heads kept, ${quality} ${value}`,
    },
  },

  picture: {
    nothing: "This report holds no exact attention for its pictures.",
    one: "Where a patch looks",
    oneNote: "Click a patch, or walk with the arrow keys: the picture glows where this patch looks, in the chosen head.",
    every: "The same patch in every head",
    everyNote: "Rows are layers, columns are heads; each glows by its own largest weight. Click a head to see it large.",
    query: "What looks",
    patches: "Patches of the picture",
    patch: "a patch",
    classToken: "class token",
    register: (index: number) => `token ${index}`,
    place: (row: number, column: number) => `patch in row ${row}, column ${column}`,
    scale: "attention, from 0 to the largest",
    peak: (share: string) => `largest weight ${share}`,
    reading: (head: string, query: string, self: string, outside: string) =>
      `In head ${head}, the ${query} keeps ${self} of its attention to itself${outside ? `; ${outside} goes to tokens that are no patches` : ""}.`,
  },

  alignment: {
    nothing: "This report holds no exact cross-attention.",
    show: "Show",
    modes: { head: "one head", layer: "mean of its layer", all: "mean of all heads" },
    layer: (layer: number) => `mean of layer ${layer}`,
    lines: "From source to target",
    linesNote: "The source is above, the target below. The stronger a line, the more the decoder looked at that source word when it had read the target word and was to write the next. Point at a word, or choose one with the arrow keys.",
    matrix: "Alignment matrix",
    matrixNote: "Rows: target. Columns: source. Each row sums to 100%.",
    every: "Every cross-attention head",
    everyNote: "Rows are layers, columns are heads. Click one to see it above.",
    source: "source",
    target: "target",
    choose: (what: string) => `Shown: ${what}. Point at a target word to see where it looks.`,
    reading: (word: string, most: string, what: string) => `${word} looks most at ${most} (${what}).`,
  },
};
