// The frame of the page: runs, views, news from the server, keys.
import { el, get, place, link, note, state, shownRuns, swatch, seconds, failed, hideTip } from "./core.js";
import { curves, engine } from "./curves.js";
import { rollouts } from "./rollouts.js";
import { timeline } from "./timeline.js";
import { evaluations } from "./evals.js";
import { configuration } from "./config.js";
import { logs } from "./logs.js";
import { proofs } from "./proofs.js";

const views = [
  ["curves", "Curves", curves],
  ["rollouts", "Rollouts", rollouts],
  ["timeline", "Timeline", timeline],
  ["evals", "Evaluations", evaluations],
  ["engine", "Engine", engine],
  ["config", "Configuration", configuration],
  ["logs", "Logs", logs],
  ["proofs", "Proof of sync", proofs],
];
const view = document.getElementById("view");
let close = () => {};
let lastNews = 0;

function drawRuns() {
  const several = state.runs.length > 1;
  document.getElementById("runs").replaceChildren(
    ...(several
      ? state.runs.map((run, index) =>
          el("label", { title: run.path },
            el("input", { type: "checkbox", checked: state.shown.has(index), onchange: (event) => choose(index, event.target.checked) }),
            swatch(index), el("span", {}, run.name)))
      : []));
  const run = state.runs[state.main];
  document.getElementById("title").textContent = several ? `prl: ${state.runs.length} runs` : `prl: ${run?.name ?? "no run"}`;
  document.title = several ? `prl: ${state.runs.length} runs` : `${run?.name ?? "prl"}`;
  drawLive();
}

function drawLive() {
  const run = state.runs[state.main];
  if (!run) return;
  const age = run.last_time > 0 ? Date.now() / 1000 - run.last_time : null;
  const steps = run.last_step < 0 ? "no step yet" : run.max_steps > 0 ? `step ${run.last_step} of ${run.max_steps}` : `step ${run.last_step}`;
  const waiting = run.rollout_files_waiting > 0 ? `, reading ${run.rollout_files_waiting} more files` : "";
  const lost = Date.now() - lastNews > 5000 && lastNews ? ", no connection" : "";
  const which = state.runs.length > 1 ? `${run.name}: ` : "";
  document.getElementById("live").textContent = `${which}${steps}${age === null ? "" : `, last row ${seconds(Math.max(0, age))} ago`}, ${run.rollouts.toLocaleString("en-US")} rollouts${waiting}${lost}`;
}

function choose(index, isShown) {
  if (isShown) state.shown.add(index);
  else state.shown.delete(index);
  if (!state.shown.size) state.shown.add(index);
  state.main = shownRuns()[0];
  note({ runs: state.runs.length > 1 ? shownRuns().join(".") : "" });
  drawRuns();
  show();
}

async function loadRuns() {
  const { runs } = await get("runs");
  state.runs = runs;
  const wanted = (place().parameters.get("runs") ?? "").split(".").filter((text) => text !== "").map(Number).filter((n) => n < runs.length);
  if (!state.shown.size) state.shown = new Set(wanted.length ? wanted : runs.map((_, index) => index).slice(0, 8));
  state.main = shownRuns()[0] ?? 0;
  drawRuns();
}

function show() {
  const now = place();
  close();
  hideTip();
  close = () => {};
  for (const tab of document.querySelectorAll("#tabs a")) {
    if (tab.dataset.view === now.view) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  const found = views.find(([name]) => name === now.view) ?? views[0];
  view.replaceChildren();
  view.dataset.view = found[0];
  try {
    close = found[2](view, now.parameters) ?? (() => {});
  } catch (error) {
    view.replaceChildren(failed(error));
  }
}

function follow() {
  const source = new EventSource("/api/events"), missed = new Set();
  let hasOpened = false;
  source.onopen = () => {
    lastNews = Date.now();
    // What happened while the connection was lost is fetched again.
    if (hasOpened) state.listeners.forEach((listener) => state.runs.forEach((_, run) => listener({ run, reset: true })));
    hasOpened = true;
  };
  source.onmessage = (event) => {
    const news = JSON.parse(event.data);
    lastNews = Date.now();
    for (const row of news.rows ?? []) {
      const run = state.runs[news.run];
      if (run && typeof row.step === "number") run.last_step = Math.max(run.last_step, row.step);
      if (run && typeof row.time === "number") run.last_time = Math.max(run.last_time, row.time);
    }
    // A page that nobody sees draws nothing; what it missed is fetched when it is seen again.
    if (document.hidden) missed.add(news.run);
    else state.listeners.forEach((listener) => listener(news));
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    for (const run of missed) state.listeners.forEach((listener) => listener({ run, reset: true }));
    missed.clear();
  });
  setInterval(async () => {
    if (document.hidden) return;
    try {
      const { runs } = await get("runs");
      state.runs = runs;
      lastNews = Date.now();
    } catch { /* shown by drawLive */ }
    drawLive();
  }, 3000);
}

function setTheme(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("theme", theme ?? ""); } catch { /* private windows */ }
}
function toggleTheme() {
  const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  setTheme(isDark ? "light" : "dark");
  show();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const number = Number(event.key);
  if (number >= 1 && number <= views.length) location.hash = `#/${views[number - 1][0]}`;
  else if (event.key === "t") toggleTheme();
  else if (event.key === "?") document.getElementById("keys").showModal();
  else if (event.key === "/") {
    const field = view.querySelector("[data-search]");
    if (field) { event.preventDefault(); field.focus(); }
  } else {
    view.dispatchEvent(new CustomEvent("shortcut", { detail: event.key }));
  }
}

document.getElementById("tabs").append(...views.map(([name, title], index) => el("a", { href: link(name, {}), "data-view": name, title: `${title} (${index + 1})` }, title)));
document.getElementById("theme").addEventListener("click", toggleTheme);
document.getElementById("help").addEventListener("click", () => document.getElementById("keys").showModal());
addEventListener("hashchange", show);
document.addEventListener("keydown", onKey);
try { setTheme(new URLSearchParams(location.search).get("theme") ?? (localStorage.getItem("theme") || undefined)); } catch { /* none */ }
/** Buttons that act on the run, where its page may: dashboard.control. The key is asked for once per tab. */
async function drawControl() {
  const bar = document.getElementById("control");
  let now;
  try { now = await get("control"); } catch { return; }
  if (!now.is_enabled) return;
  const status = el("span", { role: "status", class: "faint" }, now.is_paused ? "paused" : "");
  const field = el("input", { type: "password", size: 12, autocomplete: "off", placeholder: "key", "aria-label": "Key of the controls", value: sessionStorage.getItem("control-key") ?? "" });
  const order = async (name) => {
    if (name === "stop" && !confirm("Stop the run? It saves its last step first, if checkpoints are on.")) return;
    try {
      const response = await fetch(`/api/control/${name}`, { method: "POST", headers: { Authorization: `Bearer ${field.value}` } });
      const body = await response.json();
      if (!response.ok) throw new Error(body?.error?.message ?? `status ${response.status}`);
      sessionStorage.setItem("control-key", field.value);
      status.className = "good";
      status.textContent = { pause: "paused", resume: "goes on", checkpoint: "a checkpoint is made after the next step", stop: "stopping" }[name];
    } catch (error) {
      status.className = "bad";
      status.textContent = error.message;
    }
  };
  const button = (name, title) => el("button", { type: "button", "data-order": name, onclick: () => order(name) }, title);
  bar.replaceChildren(field, button("pause", "Pause"), button("resume", "Resume"), button("checkpoint", "Checkpoint now"), button("stop", "Stop"), status);
  bar.hidden = false;
}

try {
  await loadRuns();
  drawControl();
  show();
  follow();
} catch (error) {
  view.replaceChildren(failed(error));
}
