// Curves of the metrics of the chosen runs: the important ones first, then all others by family.
import { bytes, el, get, number, state, shownRuns, note, listen, rarely, failed } from "./core.js";
import { Chart } from "./chart.js";

/** What people look at first: a title and the keys that stand for it, the first that a run has. */
const important = [
  ["Reward", ["reward/all/mean"]],
  ["Pass rate (groups solved by all)", ["solve_all/all"]],
  ["Entropy (nats)", ["entropy/all/mean"]],
  ["Mismatch KL (nats)", ["mismatch_kl/all/mean"]],
  ["Loss", ["loss/mean"]],
  ["Gradient norm", ["optim/grad_norm"]],
  ["Completion length (tokens)", ["decode_len/all/mean"]],
  ["Truncated", ["is_truncated/all/mean"]],
  ["Throughput (tokens/s)", ["perf/throughput"]],
  ["Staleness (steps)", ["off_policy_level/all/mean"]],
  ["Validation reward", ["val_reward/all/mean", "val_reward/mean"]],
  ["Validation loss", ["val/loss"]],
  ["Learning rate", ["optim/lr"]],
];
const hidden = /\/(std|median|min|max)$/;

/** The series of the chosen runs as a list of charts: {title, key, role}. */
function chartsOf(series, wanted) {
  const seen = new Map();
  for (const list of series.values())
    for (const one of list) if (wanted(one)) seen.set(`${one.role}:${one.key}`, one);
  return [...seen.values()].sort((a, b) => a.key.localeCompare(b.key) || a.role.localeCompare(b.role));
}

const maxPoints = 800;
/** A grid of charts that fetches what is on the screen. News brings the new points with it: nothing is fetched for them. */
class Board {
  constructor(options) {
    this.options = options;
    this.charts = [];
    this.isClosed = false;
    this.visible = new Set();
    this.kept = new Map();  // what was fetched, by name()
    this.heard = new Map();  // the last row that news told of, by run
    this.observer = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const chart = this.charts.find((one) => one.chart.element === entry.target);
        if (!chart) continue;
        if (entry.isIntersecting) this.visible.add(chart);
        else this.visible.delete(chart);
      }
      this.refresh();
    }, { rootMargin: "200px" });
    this.refresh = rarely(60, () => this.load().catch((error) => this.onError?.(error)));
  }
  add(title, sources) {
    const chart = new Chart(title, { onRange: (from, to) => this.options.onRange(from, to) });
    this.charts.push({ chart, sources });
    this.observer.observe(chart.element);
    return chart.element;
  }
  async load() {
    if (this.isClosed) return;
    const charts = [...this.visible];
    const { from, to } = this.options.get();
    for (let at = 0; at < charts.length; at += 30) {
      const part = charts.slice(at, at + 30);
      const wanted = [...new Set(part.flatMap(({ sources }) => sources.map(({ role, key }) => `${role}:${key}`)))];
      const pieces = Array.from({ length: Math.ceil(wanted.length / 64) }, (_, i) => wanted.slice(64 * i, 64 * i + 64));
      const answers = await Promise.all(shownRuns().flatMap((run) => pieces.map(async (s) => ({ run, ...(await get("metrics", { run, s, from, to, points: maxPoints })) }))));
      if (this.isClosed) return;
      for (const { run } of answers) for (const one of wanted) this.kept.delete(`${run} ${one}`);
      for (const { run, series, generation, rows } of answers) {
        for (const one of series) this.kept.set(`${run} ${one.role}:${one.key}`, { ...one, generation, rows, from, to, added: 0 });
        if ((this.heard.get(run) ?? 0) > rows) this.refresh();  // news came while this was fetched
      }
      part.forEach((one) => this.show(one));
    }
  }
  show({ chart, sources }) {
    const runs = shownRuns(), several = runs.length > 1, lines = [];
    const { from, to, smoothing, log } = this.options.get();
    for (const run of runs)
      sources.forEach(({ role, key, label }, number) => {
        const found = this.kept.get(`${run} ${role}:${key}`);
        // A colour tells the run, or the source of a run that is alone; with several of both, dashes tell the source.
        if (found) lines.push({ ...found, index: several ? run : number, dash: several && sources.length > 1 ? number : undefined, name: [several ? state.runs[run].name : "", label ?? ""].filter((text) => text).join(" ") || key });
      });
    chart.set(lines, { from, to, smoothing, log });
  }
  /** Adds the points of new rows to the curves on the screen; false if these must be fetched instead. */
  append({ run, rows, generation, last_row: last }) {
    this.heard.set(run, last);
    const first = last - rows.length + 1;
    const changed = new Set();
    for (const shown of this.visible)
      for (const { role, key } of shown.sources) {
        const one = this.kept.get(`${run} ${role}:${key}`);
        if (!one) {
          if (rows.some((row) => row.role === role && typeof row[key] === "number")) return false;
          continue;
        }
        if (one.generation !== generation || one.rows + 1 < first) return false;
        for (let at = Math.max(0, one.rows + 1 - first); at < rows.length; ++at) {
          const { step, [key]: value } = rows[at];
          if (rows[at].role !== role || typeof value !== "number" || step < (one.from ?? 0) || step > (one.to ?? Infinity)) continue;
          // A step that is logged again takes the place of a point, and curves that have grown long are thinned by the server.
          if (step <= (one.steps.at(-1) ?? -1) || ++one.added > maxPoints / 4) return false;
          one.steps.push(step);
          for (const list of [one.mean, one.min, one.max]) list?.push(value);
        }
        one.rows = Math.max(one.rows, last);
        changed.add(shown);
      }
    changed.forEach((shown) => this.show(shown));
    return true;
  }
  close() {
    this.isClosed = true;
    this.observer.disconnect();
    this.charts.forEach(({ chart }) => chart.close());
  }
}

function controls(parameters, changed) {
  const read = () => ({
    smoothing: Number(smoothing.value) / 100,
    log: log.checked,
    from: from.value === "" ? undefined : Number(from.value),
    to: to.value === "" ? undefined : Number(to.value),
  });
  const tell = () => {
    const now = read();
    note({ smoothing: now.smoothing || "", log: now.log ? 1 : "", from: from.value, to: to.value });
    changed();
  };
  const smoothing = el("input", { type: "range", min: 0, max: 99, value: Math.round(100 * Number(parameters.get("smoothing") ?? 0)), oninput: tell, "aria-label": "Smoothing" });
  const log = el("input", { type: "checkbox", checked: parameters.get("log") === "1", onchange: tell });
  const from = el("input", { type: "number", min: 0, value: parameters.get("from") ?? "", onchange: tell, placeholder: "first" });
  const to = el("input", { type: "number", min: 0, value: parameters.get("to") ?? "", onchange: tell, placeholder: "last" });
  const filter = el("input", { type: "search", value: parameters.get("filter") ?? "", placeholder: "key", "data-search": true, "aria-label": "Filter of keys" });
  return {
    read, filter,
    range: (first, last) => { from.value = first ?? ""; to.value = last ?? ""; tell(); },
    toggleLog: () => { log.checked = !log.checked; tell(); },
    element: el("div", { class: "tools" }, el("label", {}, "Filter", filter), el("label", {}, "Smoothing", smoothing), el("label", {}, log, "Logarithmic"),
      el("label", {}, "Steps", from, "to", to), el("button", { type: "button", onclick: () => { from.value = to.value = ""; tell(); } }, "All steps")),
  };
}

/** A page of charts; `sections(series, text)` gives [{title, open, charts: [{title, sources}]}]. */
function board(view, parameters, sections) {
  const tools = controls(parameters, () => current?.refresh());
  const body = el("div");
  view.append(tools.element, body);
  let current = null, series = new Map(), known = "";
  const names = new Map();  // of the metrics that each run has
  const options = { get: () => tools.read(), onRange: (from, to) => tools.range(from, to) };
  const build = () => {
    current?.close();
    current = new Board(options);
    current.onError = (error) => body.prepend(failed(error));
    const open = new Set([...body.querySelectorAll("details[open]")].map((one) => one.dataset.name));
    const text = tools.filter.value.trim().toLowerCase();
    const made = sections(series, text).filter(({ charts }) => charts.length);
    body.replaceChildren(...made.map(({ title, open: isOpen, charts }) => {
      const grid = el("div", { class: "charts" });
      const fill = () => { if (!grid.childElementCount) grid.append(...charts.map((chart) => current.add(chart.title, chart.sources))); };
      if (isOpen || text) { fill(); return el("section", {}, el("h2", {}, title), grid); }
      const details = el("details", { "data-name": title, open: open.has(title), ontoggle: () => details.open && fill() }, el("summary", {}, `${title} (${charts.length})`), grid);
      if (open.has(title)) fill();
      return details;
    }));
    if (!made.length) body.append(el("p", { class: "note" }, text ? "No metric has this in its name." : "No metrics yet: they come with the first step."));
  };
  const load = async () => {
    const runs = shownRuns();
    const lists = await Promise.all(runs.map((run) => get("series", { run })));
    series = new Map(runs.map((run, i) => [run, lists[i]]));
    runs.forEach((run, i) => names.set(run, new Set([...(names.get(run) ?? []), ...lists[i].map((one) => `${one.role}:${one.key}`)])));
    const text = lists.map((list) => list.map((one) => one.role + one.key).join()).join("|");
    if (text !== known) { known = text; build(); }
    else current?.refresh();
  };
  /** Whether rows have metrics that were never asked for; once for each. */
  const hasNewNames = ({ run, rows }) => {
    if (!names.has(run)) names.set(run, new Set());
    const before = names.get(run).size;
    for (const row of rows) for (const key in row) if (key !== "step" && key !== "time" && typeof row[key] === "number") names.get(run).add(`${row.role}:${key}`);
    return names.get(run).size > before;
  };
  const reload = rarely(300, () => load().catch((error) => body.prepend(failed(error))));
  const stop = listen((news) => {
    if (!state.shown.has(news.run)) return;
    if (news.reset || (news.rows?.length && hasNewNames(news))) reload();
    else if (news.rows?.length && !current?.append(news)) current?.refresh();
  });
  tools.filter.addEventListener("input", () => { note({ filter: tools.filter.value }); build(); });
  const onShortcut = (event) => event.detail === "l" && tools.toggleLog();
  view.addEventListener("shortcut", onShortcut);
  load().catch((error) => body.append(failed(error)));
  return () => { stop(); view.removeEventListener("shortcut", onShortcut); current?.close(); };
}

function titled(one, list) {
  const same = list.filter((other) => other.key === one.key).length > 1;
  return { title: same ? `${one.key} (${one.role})` : one.key, sources: [{ role: one.role, key: one.key }] };
}

/** Metrics that are there for all rollouts and for each environment ("reward/all/mean", "reward/words/mean"): a chart with a line for each. */
function byEnvironment(all) {
  const charts = [];
  for (const { role, key } of all) {
    const found = /^(.+)\/all(\/mean)?$/.exec(key);
    if (!found) continue;
    const [, family, end = ""] = found;
    const names = all.filter((one) => one.role === role && one.key.startsWith(`${family}/`) && one.key.endsWith(end) && one.key !== key)
      .map((one) => one.key.slice(family.length + 1, one.key.length - end.length)).filter((name) => name && !hidden.test(`/${name}`) && name !== "all/mean");
    if (names.length < 2) continue;  // of one alone the curve of all is its own
    charts.push({ title: `${family} by environment`, sources: ["all", ...names].map((name) => ({ role, key: `${family}/${name}${end}`, label: name })) });
  }
  return charts;
}

export function curves(view, parameters) {
  return board(view, parameters, (series, text) => {
    const all = chartsOf(series, () => true);
    if (text) return [{ title: "Found", charts: all.filter((one) => `${one.role}:${one.key}`.toLowerCase().includes(text)).slice(0, 60).map((one) => titled(one, all)) }];
    const first = important.map(([title, keys]) => {
      const key = keys.find((name) => all.some((one) => one.key === name));
      // One key of several roles is one chart with a line for each.
      return { title, sources: all.filter((one) => one.key === key).map((one) => ({ role: one.role, key, label: one.role })) };
    }).filter(({ sources }) => sources.length).map(({ title, sources }) => ({ title, sources: sources.length > 1 ? sources : [{ ...sources[0], label: "" }] }));
    const shared = byEnvironment(all);
    const drawn = new Set(shared.flatMap(({ sources }) => sources.map(({ role, key }) => `${role}:${key}`)));
    const environments = all.filter((one) => /^(reward|val_reward|metrics)\/(?!all\/)/.test(one.key) && !hidden.test(one.key) && !drawn.has(`${one.role}:${one.key}`));
    const families = new Map();
    for (const one of all) {
      const family = one.key.split("/")[0];
      if (!families.has(family)) families.set(family, []);
      families.get(family).push(titled(one, all));
    }
    return [
      { title: "Overview", open: true, charts: first },
      { title: "By environment", open: shared.length > 0, charts: [...shared, ...environments.map((one) => titled(one, all))] },
      ...[...families].sort(([a], [b]) => a.localeCompare(b)).map(([family, charts]) => ({ title: family, charts })),
    ];
  });
}

/** Plans of memory, of each process that made one: what gets how much of its device. */
async function memoryPlans(box) {
  const plans = await get("memory", { run: state.main });
  if (!plans.length) return box.replaceChildren(el("p", { class: "faint" }, "No plan of memory: a run makes one for each GPU, none for a CPU."));
  box.replaceChildren(...plans.map((plan) => {
    const row = (part, where) => el("tr", {}, el("td", {}, part.name), el("td", {}, where), el("td", { class: "n" }, bytes(part.bytes)), el("td", { class: "n" }, where === "device" && plan.available ? `${number((100 * part.bytes) / plan.available, 3)}%` : ""), el("td", { class: "n" }, part.foretold ? bytes(part.foretold) : ""));
    return el("div", { class: "scroll" }, el("h3", {}, `${plan.process}: ${bytes(plan.total)} of ${bytes(plan.available)}${plan.num_kv_blocks ? `, ${number(plan.num_kv_blocks)} cache blocks` : ""}`),
      el("table", { "data-plan": plan.process }, el("thead", {}, el("tr", {}, ...["Part", "In memory of the", "Bytes", "Of what may be taken", "Foretold"].map((name, i) => el("th", { class: i > 1 ? "n" : "" }, name)))),
        el("tbody", {}, ...plan.parts.map((part) => row(part, "device")), ...plan.host.map((part) => row(part, "host")))));
  }));
}

/** Load of engines: what runs, waits and is used, as far as the run logs it; and the plans of memory. */
export function engine(view, parameters) {
  const plans = el("section", {}, el("h2", {}, "Memory plan")), box = el("div");
  plans.append(box);
  memoryPlans(box).catch((error) => box.append(failed(error)));
  const close = engineCharts(view, parameters);
  view.append(plans);
  return close;
}

function engineCharts(view, parameters) {
  const load = /^(inference|dispatcher|concurrency|scheduler|watcher|perf|event_loop_lag)\//;
  const memory = /^(system)\/|memory/;
  return board(view, parameters, (series, text) => {
    const all = chartsOf(series, ({ key }) => load.test(key) || memory.test(key) || /^(decode_len|prefill_len|seq_len)\/all\/mean$/.test(key) || /^timing\/all\/(model|env|generation|scoring)\/mean$/.test(key));
    const kept = all.filter((one) => !text || `${one.role}:${one.key}`.toLowerCase().includes(text));
    const pick = (test) => kept.filter((one) => test(one.key)).map((one) => titled(one, all));
    return [
      { title: "Running and waiting", open: true, charts: pick((key) => load.test(key) && !key.startsWith("perf/")) },
      { title: "Speed", open: true, charts: pick((key) => key.startsWith("perf/") || key.startsWith("timing/")) },
      { title: "Lengths", open: true, charts: pick((key) => /_len\//.test(key)) },
      { title: "Memory and disk", open: true, charts: pick((key) => memory.test(key) && !key.startsWith("perf/")) },
    ];
  });
}
