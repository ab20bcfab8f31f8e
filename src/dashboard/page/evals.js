// Evaluations over steps with intervals of the mean, and what `prl eval` wrote into the folder.
import { el, get, number, state, shownRuns, listen, rarely, failed, link } from "./core.js";
import { Chart } from "./chart.js";

export function evaluations(view) {
  const body = el("div");
  view.append(body);
  let charts = [];
  async function load() {
    const runs = shownRuns();
    const [answers, series] = [await Promise.all(runs.map((run) => get("evals", { run }))), await Promise.all(runs.map((run) => get("series", { run })))];
    charts.forEach((chart) => chart.close());
    charts = [];
    body.replaceChildren();
    const environments = [...new Set(answers.flatMap(({ points }) => points.map(({ env }) => env)))];
    const grid = el("div", { class: "charts" });
    for (const env of environments) {
      const chart = new Chart(`${env}: mean reward, 95% interval`);
      charts.push(chart);
      grid.append(chart.element);
      queueMicrotask(() => chart.set(answers.map(({ points }, i) => {
        const own = points.filter((point) => point.env === env);
        return { name: state.runs[runs[i]].name, index: runs.length > 1 ? runs[i] : 0, steps: own.map((p) => p.step), mean: own.map((p) => p.mean), errors: own.map((p) => p.half_width) };
      }).filter((line) => line.steps.length), {}));
    }
    if (environments.length) body.append(el("h2", {}, "While training"), grid);
    const keys = [...new Set(series.flat().filter(({ key }) => /^(eval|val_reward|val)\//.test(key) && !/\/(std|median|min|max)$/.test(key)).map(({ role, key }) => `${role}:${key}`))].sort();
    if (keys.length) {
      const logged = el("div", { class: "charts" });
      body.append(el("h2", {}, "Logged metrics"), logged);
      const data = await Promise.all(runs.map((run) => get("metrics", { run, s: keys.slice(0, 64) })));
      for (const name of keys.slice(0, 64)) {
        const chart = new Chart(name.slice(name.indexOf(":") + 1));
        charts.push(chart);
        logged.append(chart.element);
        chart.set(data.flatMap(({ series: list }, i) => list.filter((one) => `${one.role}:${one.key}` === name).map((one) => ({ ...one, name: state.runs[runs[i]].name, index: runs.length > 1 ? runs[i] : 0 }))), {});
      }
    }
    const rows = answers.flatMap(({ points }, i) => points.map((point) => el("tr", {}, el("td", {}, state.runs[runs[i]].name), el("td", { class: "n" }, el("a", { href: link("rollouts", { run: runs[i], kind: "eval", from: point.step, to: point.step, env: point.env }) }, String(point.step))), el("td", {}, point.env), el("td", { class: "n" }, `${number(point.mean)} ± ${number(point.half_width, 2)}`), el("td", { class: "n" }, String(point.count)), el("td", { class: "n" }, String(point.truncated)), el("td", { class: "n" }, String(point.failed)))));
    if (rows.length) body.append(el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...["Run", "Step", "Environment", "Mean reward", "Rollouts", "Truncated", "Failed"].map((name) => el("th", {}, name)))), el("tbody", {}, ...rows))));
    const results = answers.flatMap(({ results: list }, i) => list.map(({ folder, metadata }) => el("tr", {}, el("td", {}, state.runs[runs[i]].name), el("td", { class: "text" }, folder), el("td", {}, String(metadata?.model ?? "")), el("td", { class: "n" }, number(metadata?.avg_reward)), el("td", { class: "n" }, number(metadata?.num_examples)))));
    if (results.length) body.append(el("h2", {}, "Results of prl eval"), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...["Run", "Folder", "Model", "Mean reward", "Examples"].map((name) => el("th", {}, name)))), el("tbody", {}, ...results))));
    if (!body.childElementCount) body.append(el("p", { class: "note" }, "No evaluation yet: the section orchestrator.eval asks for them while training, prl eval afterwards."));
  }
  const reload = () => load().catch((error) => body.append(failed(error)));
  const stop = listen(rarely(2500, reload));
  reload();
  return () => { stop(); charts.forEach((chart) => chart.close()); };
}
