// What Python says in English sentences (names of corpora, notes, roles, mistakes), in Chinese. What is not known here is
// shown as it is. tests/view/test_words.py holds it against the sentences that Python has.

const EXACT: Record<string, string> = {
  // data/corpus.py
  "built-in sample text": "内置文本",
  "standard input": "标准输入",

  // heads/roles/catalogue.py: what a role means
  "For 9 of 10 queries the largest weight is always at the same distance: the token before, after, ...":
    "十分之九的查询，最大权重总在同一距离上：前一个词元、后一个词元等",
  "It looks less than half as far as a uniform reader (local), or as far as one and farther (global).":
    "看得不到均匀注意者的一半远（局部），或与其一样远甚至更远（全局）",
  "It leaves most of its attention on the first token, on special tokens, or on a learned sink.":
    "大部分注意力停留在首个词元、特殊词元或可学习的注意力汇上",
  "Its entropy is at least nine tenths of that of a uniform reader: it averages over all it sees.":
    "熵至少是均匀注意者的十分之九：对看到的一切取平均",
  "Its largest weight is on the rarest token that the query may see.": "最大权重落在查询可见的最罕见词元上",
  "Most of its attention is on punctuation and on special tokens behind the first.": "大部分注意力在标点以及首个之外的特殊词元上",
  "The values it reads are less than half as long as what a uniform reader gets: it does nothing much.":
    "读到的值向量长度不到均匀注意者的一半：几乎什么也不做",
  "In random tokens that come twice, it attends to the first occurrence of the same token.":
    "在重复两遍的随机词元中，关注同一词元第一次出现的位置",
  "In random tokens that come twice, it attends to the token that came next the first time.":
    "在重复两遍的随机词元中，关注该词元第一次出现之后的下一个词元",
  "What it writes raises the logit of the token it attends to: more than those of 3 in 4 others.":
    "它的输出提高所关注词元的分数，超过其他词元的四分之三",
  "When a key planted in a long text comes again, its largest weight is on what followed the key there.":
    "埋在长文本中的关键词再次出现时，最大权重落在它当初后面的内容上",
  "From a word its largest weight is on the word of a dependency, 10 points over the best fixed offset.":
    "从一个词出发，最大权重落在其依存关系的词上，比最佳固定偏移高 10 个百分点",

  // what a role's baseline is
  "a random visible key": "随机选一个可见的键",
  "a uniform reader": "均匀注意者",
  "the largest entropy there is": "可能的最大熵",
  "another token of the first copy": "第一遍中的其他词元",
  "another token": "其他词元",
  "the best fixed offset": "最佳固定偏移",

  // why a role was not judged
  "no meaning in cross-attention": "在交叉注意力中没有意义",
  "no next token to copy to": "没有可供复制的下一个词元",
  "no case found": "没有找到实例",
  "no treebank": "没有树库",
  "no tokenizer": "没有分词器",
  "no vocabulary head": "没有词表输出层",
  "the batches hold no token ids": "输入中没有词元编号",
  "the model has no vocabulary head": "模型没有词表输出层",
  "what enters the vocabulary head does not come from a norm": "进入词表输出层的内容不来自归一化层",

  // heads/importance, heads/effects: what a number measures
  "KL(full || silenced), nats a token": "KL(完整 || 消融)，奈特/词元",
  "KL(full || silenced), nats a sequence": "KL(完整 || 消融)，奈特/序列",
  "1 - cosine of the mean hidden state": "1 − 平均隐藏状态的余弦",
  "half the square of the change of the output": "输出变化平方的一半",
  "slope of the loss labels": "标签损失的斜率",

  // data/labelled
  "prompts and answers are read in the model's chat template; the answers are predicted": "提示和回答按模型的对话模板读入；预测的是回答",
  "prompts and answers are read as plain text: the tokenizer has no chat template; the answers are predicted":
    "提示和回答按纯文本读入：分词器没有对话模板；预测的是回答",
  "the texts are read as they are, without the model's chat template; a column of messages, or of prompts and completions, is read with it":
    "文本按原样读入，未用模型的对话模板；messages 列，或 prompt 和 completion 列，会按模板读入",

  // view/inspect.py
  "The counting ended early: these numbers are of a part of the corpus.": "统计提前结束：这些数字只来自语料的一部分。",

  "heads that are not verified are not silenced, neither alone nor in the curve": "未经验证的头不消融，单独消融和剪枝曲线都不包括它们",

  // notes of sites: capture/handlers.py, capture/probing.py
  "the model changes its weights after the softmax: the numbers are of the weights it uses":
    "模型在 softmax 之后改变了权重：这些数值来自模型实际使用的权重",
  "some weights are negative: they have no entropy, confidence or distance": "有些权重是负的：它们没有熵、置信度和距离",
  "rows of weights do not sum to one: entropy and distance are of the normalised ones":
    "各行权重之和不为一：熵和距离来自归一化之后的权重",
  "more than attention's output flows into what reads this head (a norm, a convolution, a residual): silence makes zero what attention gives, which is not the same as zeroing the columns that read it":
    "读取该头的部分还接收注意力输出以外的内容（归一化、卷积、残差）：消融是把注意力给出的内容置零，与把读取它的列置零不同",

  // view/live
  "text: it is empty; type something": "文本是空的；请输入一些内容",
  "text: the tokenizer gives no token for it; type some words": "分词器没有给出任何词元；请输入一些词",
  "heads: none is chosen; choose the heads to remove first": "还没有选择头；请先选择要剪掉的头",
  "heads: these are all heads of the model; leave at least one": "这是模型的全部头；请至少保留一个",
  "image: it cannot be read; expected one of BMP, GIF, JPEG, PNG, WEBP": "无法读取这张图片；支持 BMP、GIF、JPEG、PNG、WEBP",
};

const PARTS: Record<string, string> = {
  importance: "重要性",
  examples: "示例",
  redundancy: "冗余度",
  roles: "角色",
  curve: "剪枝曲线",
  neighbours: "相近句子",
  translation: "译文",
  answers: "回答",
  "what silencing changes": "消融的影响",
  watch: "统计量",
  fisher: "Fisher 信息",
  diversity: "冗余度",
  elimination: "逐个淘汰",
};

const UNITS: Record<string, string> = { images: "张图像", sounds: "段声音", texts: "段文本", queries: "个查询", pairs: "个词对" };

const sitesSaid = (sites: string) => sites.replace(/^(\d+) sites /, "$1 处");
const part = (name: string) => PARTS[name] ?? name;
const unit = (name: string) => UNITS[name] ?? ` ${name}`;

const PATTERNS: [RegExp, (...found: string[]) => string][] = [
  [/^roles, importance, redundancy and the curve are measured on (.+)$/, (on) => `角色、重要性、冗余度和剪枝曲线测自：${said(on!)}`],
  [/^([\d,]+) tokens in ([\d,]+) of ([\d,]+) texts$/, (tokens, some, all) => `${all} 段文本中的 ${some} 段，共 ${tokens} 个词元`],
  [/^([\d,]+) of ([\d,]+) sounds$/, (some, all) => `${all} 段声音中的 ${some} 段`],
  [/^labels are (names|numbers) of classes \((.+)\)$/, (by, names) => `标签是类别的${by === "names" ? "名称" : "编号"}（${names}）`],
  [/^([\d.]+%) of the tokens are hidden, at least one of each text, drawn with the seed (\d+)$/, (share, seed) => `${share} 的词元被遮住，每段文本至少一个，随机种子为 ${seed}`],
  [/^([\d,]+) of ([\d,]+) rows \((.+?)\) are longer than ([\d,]+) tokens and were cut to that length$/, (some, all, share, length) => `${all} 行中有 ${some} 行（${share}）超过 ${length} 个词元，已截断到该长度`],
  [/^([\d,]+) of ([\d,]+) rows \((.+?)\) have no label and are left out$/, (some, all, share) => `${all} 行中有 ${some} 行（${share}）没有标签，未使用`],
  [/^only (\d+) tokens of text fit around a key, and (\d+) are needed$/, (some, least) => `关键词周围只放得下 ${some} 个词元，至少需要 ${least} 个`],
  [/^the text leaves (\d+) tokens of the vocabulary unused, and a key needs (\d+)$/, (some, least) => `文本只剩 ${some} 个未用到的词元，关键词需要 ${least} 个`],
  [/^the batches hold '(.+)', which cannot be made up$/, (name) => `批次中有 ${name}，无法自行构造`],
  [/^([\d,]+) of ([\d,]+) images$/, (some, all) => `${all} 张图像中的 ${some} 张`],
  [/^([\d,]+) of ([\d,]+) held-out examples$/, (some, all) => `${all} 个留出样例中的 ${some} 个`],
  [/^the first batch \(up to ([\d,]+) tokens\)$/, (tokens) => `第一个批次（至多 ${tokens} 个词元）`],
  [/^the first (\d+) batches \(up to ([\d,]+) tokens\)$/, (batches, tokens) => `前 ${batches} 个批次（至多 ${tokens} 个词元）`],
  [/^([\d.]+%) of the tokens are unknown to the tokenizer: .*$/, (share) => `${share} 的词元是分词器不认识的：所有这些词共用一个词元，头对它的注意力说明不了这些词`],
  [/^of each of these texts no more than the first (\d+) tokens were read$/, (tokens) => `这些文本每篇至多读前 ${tokens} 个词元`],
  [/^silenced one by one: the (\d+) most important of (\d+) heads$/, (some, all) => `逐个消融：${all} 个头中最重要的 ${some} 个`],
  [/^(.+): left out \((.+)\)$/, (name, why) => `${part(name!)}：未能测量（${why}）`],
  [/^(.+): interrupted; this part and all later parts are left out$/, (name) => `${part(name!)}：被中断，此项及其后各项从略`],
  [/^(.+) was not seen: (.+)$/, (path, why) => `未能观察 ${path}：${why}`],
  [/^not verified, (.+?): (.+)$/, (sites, why) => `未经验证，${sitesSaid(sites!)}：${why}`],
  [/^(\S+|\d+ sites \(.+?\)): ((?:the model changes|some weights|rows of weights|more than attention's).+)$/, (sites, notes) => `${sitesSaid(sites!)}：${notes!.split("; ").map(said).join("；")}`],
  [/^heads: the heads of '(.+)' are not verified \((.+)\), so they are not silenced here; choose others$/, (site, why) => `${site} 的头未经验证（${why}），因此不能在此消融；请选择其他头`],
  [/^heads: '(.+)' shares each key head among .* groups are (.+)$/, (site, groups) => `${site} 的几个头共用一个键头：请整组剪掉，或从每组剪掉相同数目；各组为 ${groups}`],
  [/^too few \((.+) of (\d+) (\w+)\)$/, (found, least, what) => `实例太少（${found}，至少需要 ${least} ${unit(what!).trim()}）`],
];

/** A sentence of Python in Chinese, if it is known. */
export function said(text: string): string {
  const exact = EXACT[text];
  if (exact !== undefined) return exact;
  for (const [pattern, say] of PATTERNS) {
    const found = pattern.exec(text);
    if (found) return say(...found.slice(1));
  }
  return text;
}
