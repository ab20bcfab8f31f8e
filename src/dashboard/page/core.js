// What all views share: elements, requests, numbers, the address, and the runs that are shown.

/** An element. Attributes come as an object; "on..." are listeners. Children are elements or text, which is never read as HTML. */
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "class") node.className = value;
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** JSON of an API route; throws with the server's own words. */
export async function get(route, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters)) {
    if (Array.isArray(value)) value.forEach((one) => query.append(key, one));
    else if (value !== undefined && value !== null && value !== "") query.append(key, value);
  }
  const response = await fetch(`/api/${route}?${query}`, { signal });
  const body = await response.json();
  if (!response.ok) throw new Error(body?.error?.message ?? `${route}: status ${response.status}`);
  return body;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return String(value);
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e7) return value.toExponential(digits - 1);
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  return String(Number(value.toPrecision(Math.max(digits, size >= 1000 ? 6 : digits))));
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 60) return `${value.toFixed(1)} s`;
  if (value < 3600) return `${Math.floor(value / 60)} m ${Math.round(value % 60)} s`;
  return `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} m`;
}

export function bytes(value) {
  if (value < 1024) return `${value} B`;
  if (value < 1 << 20) return `${(value / 1024).toFixed(1)} KiB`;
  if (value < 2 ** 30) return `${(value / (1 << 20)).toFixed(1)} MiB`;
  return `${(value / 2 ** 30).toFixed(2)} GiB`;
}

/** The address after "#": a view and its parameters, so that everything that is seen has a link. */
export function place() {
  const [view, query] = location.hash.replace(/^#\/?/, "").split("?");
  return { view: view || "curves", parameters: new URLSearchParams(query ?? "") };
}
export function link(view, parameters) {
  const query = new URLSearchParams();
  for (const [key, value] of Object.entries(parameters))
    if (value !== undefined && value !== null && value !== "") query.set(key, value);
  const text = query.toString();
  return `#/${view}${text ? "?" + text : ""}`;
}
/** Changes parameters of the address without another entry in the history. */
export function note(parameters) {
  const now = place();
  for (const [key, value] of Object.entries(parameters)) {
    if (value === undefined || value === null || value === "") now.parameters.delete(key);
    else now.parameters.set(key, value);
  }
  history.replaceState(null, "", link(now.view, Object.fromEntries(now.parameters)));
}

export const dashes = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
export function color(index) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--s${index % 8}`).trim();
}
export function style(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}
/** A piece of the line that stands for a run: colour and dashes. */
export function swatch(index) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("class", "swatch");
  svg.setAttribute("viewBox", "0 0 26 10");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  for (const [key, value] of Object.entries({ x1: 0, y1: 5, x2: 26, y2: 5, "stroke-width": 3, stroke: `var(--s${index % 8})` }))
    line.setAttribute(key, value);
  line.setAttribute("stroke-dasharray", dashes[index % dashes.length].join(" "));
  svg.append(line);
  return svg;
}

/** The runs, which of them are shown, and who wants to know of news. */
export const state = {
  runs: [],
  shown: new Set(),
  main: 0,
  listeners: new Set(),
};
export const shownRuns = () => [...state.shown].filter((index) => index < state.runs.length).sort((a, b) => a - b);
/** Calls `listener` with each piece of news until the view ends. */
export function listen(listener) {
  state.listeners.add(listener);
  return () => state.listeners.delete(listener);
}

/** `work` at most once per `milliseconds`, the last call never lost. */
export function rarely(milliseconds, work) {
  let timer = null;
  return () => {
    if (timer !== null) return;
    timer = setTimeout(() => { timer = null; work(); }, milliseconds);
  };
}

export function failed(error) {
  return el("p", { class: "bad", role: "alert" }, error.message ?? String(error));
}

const tip = document.getElementById("tip");
export function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - box.width - 6))}px`;
  tip.style.top = `${y + 18 + box.height > innerHeight ? Math.max(4, y - box.height - 10) : y + 18}px`;
}
export function hideTip() { tip.hidden = true; }
