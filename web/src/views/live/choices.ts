// Which heads are silenced: by rule, by ranking, all at once; and the plan that cuts them for good.
import type { SelectionRequest } from "../../document";
import { html, unique } from "../../draw/element";
import { download } from "../../draw/save";
import { bySite, indexes, type Bench, type Part } from "../live";

export function choices(bench: Bench): Part {
  const { live, page } = bench;
  const words = page.words.live;
  const all = page.document.heads.name.length;
  const { rules, rankings, stages, command } = live.progress;
  const count = html("p", { class: "count", "data-part": "kept" });
  const wrong = html("p", { class: "wrong", role: "alert", hidden: true });
  const clear = html("button", { type: "button", "data-do": "clear", onclick: () => bench.silence([]) }, words.clear);
  let choosing = 0;

  async function choose(wanted: SelectionRequest): Promise<void> {
    const mine = ++choosing;
    element.classList.add("waiting");
    try {
      const { heads } = await live.ask("/api/choose", wanted);
      if (mine !== choosing) return;
      tell("");
      const found = indexes(page, heads);
      bench.silence(found);
      page.announce(words.found(found.length));
    } catch (error) {
      if (mine === choosing) tell(error instanceof TypeError ? words.lost : page.words.said(String(error instanceof Error ? error.message : error)));
    } finally {
      if (mine === choosing) element.classList.remove("waiting");
    }
  }

  function tell(what: string): void {
    wrong.textContent = what;
    wrong.hidden = !what;
  }

  const rule = rules.map((name) =>
    html("button", { type: "button", class: "chip", "data-rule": name, title: words.rulesMean[name] ?? "", onclick: () => void choose({ rule: name }) }, words.rules[name] ?? name),
  );
  const ranking = html("select", { "aria-label": words.byRanking, "data-control": "ranking", onchange: () => rank() });
  for (const name of rankings) ranking.append(html("option", { value: name, selected: name === live.choice.ranking }, words.rankings[name] ?? name));
  const id = unique("share");
  const share = html("input", { id, type: "range", min: 0, max: 95, step: 5, value: live.choice.percent, "data-control": "share", oninput: () => say(), onchange: () => rank() });
  const said = html("label", { for: id });
  const say = () => (said.textContent = words.least(Number(share.value)));
  const rank = () => {
    say();
    live.choice = { ranking: ranking.value, percent: Number(share.value) };
    void choose({ ranking: ranking.value, keep: (100 - live.choice.percent) / 100 });
  };
  say();

  const saved = html("span", { role: "status", class: "note" });
  const plan = html("button", { type: "button", class: "go", "data-do": "plan", onclick: () => void save() }, words.plan);
  async function save(): Promise<void> {
    try {
      download("plan.json", await live.plan({ heads: bySite(page, page.state.now.silenced) }));
      tell("");
      saved.textContent = words.planDone;
    } catch (error) {
      tell(error instanceof TypeError ? words.lost : page.words.said(String(error instanceof Error ? error.message : error)));
    }
  }
  const copy = html("button", { type: "button", class: "copy", onclick: () => void copied() }, words.copy);
  async function copied(): Promise<void> {
    await navigator.clipboard.writeText(command);
    copy.textContent = words.copied;
  }

  const element = html(
    "section",
    { class: "chart choose", "data-part": "choices" },
    html("h3", {}, words.silenced),
    html("div", { class: "row" }, count, clear),
    stages.length
      ? html(
          "div",
          { class: "ways" },
          html("div", { class: "row", role: "group", "aria-label": words.byRule }, html("span", { class: "label" }, words.byRule), ...rule),
          html("div", { class: "row" }, html("span", { class: "label" }, words.byRanking), ranking),
          html("div", { class: "row slide" }, share, said),
        )
      : null,
    wrong,
    html("div", { class: "row" }, plan, saved),
    html("p", { class: "note" }, words.planNote),
    html("p", { class: "command" }, html("code", {}, command), navigator.clipboard ? copy : null),
  );
  return {
    element,
    update() {
      const silenced = page.state.now.silenced.length;
      count.textContent = words.kept(all - silenced, all);
      clear.disabled = !silenced;
      plan.disabled = !silenced;
      if (!silenced) saved.textContent = "";
    },
  };
}
