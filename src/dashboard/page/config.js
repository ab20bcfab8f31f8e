// The resolved configuration, and how it differs from that of the other chosen runs.
import { el, get, state, shownRuns, note, failed } from "./core.js";

/** {"trainer.optim.lr": "0.0005", ...} */
function flatten(value, prefix, into) {
  if (value !== null && typeof value === "object" && Object.keys(value).length) for (const [key, one] of Object.entries(value)) flatten(one, prefix ? `${prefix}.${key}` : key, into);
  else into.set(prefix, JSON.stringify(value));
  return into;
}

export function configuration(view, parameters) {
  const runs = shownRuns();
  const body = el("div"), filter = el("input", { type: "search", placeholder: "key or value", "data-search": true, "aria-label": "Filter of keys", value: parameters.get("filter") ?? "" });
  const only = el("input", { type: "checkbox", checked: runs.length > 1 && parameters.get("all") !== "1" }), file = el("select", { "aria-label": "File" });
  view.append(el("div", { class: "tools" }, el("label", {}, "File", file), el("label", {}, "Filter", filter), runs.length > 1 ? el("label", {}, only, "Only what differs") : null), body);
  (async () => {
    const configs = await Promise.all(runs.map((run) => get("config", { run })));
    const files = [...new Set(configs.flatMap((config) => Object.keys(config)))];
    const best = ["rl", "sft", "eval", ...files].find((name) => files.includes(name));
    file.append(...files.map((name) => el("option", { value: name, selected: name === (parameters.get("file") ?? best) }, name)));
    if (!files.length) return body.append(el("p", { class: "note" }, "The run has no configs folder."));
    const draw = () => {
      note({ file: file.value === best ? "" : file.value, filter: filter.value, all: runs.length > 1 && !only.checked ? 1 : "" });
      const columns = configs.map((config) => flatten(config[file.value] ?? {}, "", new Map()));
      const keys = [...new Set(columns.flatMap((column) => [...column.keys()]))].sort();
      const text = filter.value.trim().toLowerCase();
      const rows = [];
      for (const key of keys) {
        const values = columns.map((column) => column.get(key));
        const differs = values.some((value) => value !== values[0]);
        if (runs.length > 1 && only.checked && !differs) continue;
        if (text && !`${key} ${values.join(" ")}`.toLowerCase().includes(text)) continue;
        rows.push(el("tr", { class: differs ? "changed" : "" }, el("td", { class: "text" }, differs ? `≠ ${key}` : key), ...values.map((value) => el("td", { class: "text" }, value ?? "absent"))));
      }
      body.replaceChildren(el("p", { class: "faint", role: "status" }, `${rows.length} of ${keys.length} keys`), el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, el("th", {}, "Key"), ...runs.map((run) => el("th", {}, state.runs[run].name)))), el("tbody", {}, ...rows))));
    };
    for (const one of [filter, only, file]) one.addEventListener("input", draw);
    draw();
  })().catch((error) => body.append(failed(error)));
}
