// Log files by level, role and text; the newest lines first on the screen's end, as in a terminal.
import { el, get, state, note, listen, rarely, failed } from "./core.js";

const signs = { debug: "·", info: "i", success: "✓", warning: "!", error: "✗" };
const classes = { success: "good", warning: "warn", error: "bad", debug: "faint" };

export function logs(view, parameters) {
  const run = state.main;
  const set = () => { note({ file: file.value, level: level.value, role: role.value, q: q.value }); reload(); };
  const file = el("select", { onchange: set, "aria-label": "File" }), role = el("input", { onchange: set, size: 12, placeholder: "all", value: parameters.get("role") ?? "", "aria-label": "Role" });
  const level = el("select", { onchange: set, "aria-label": "Level" }, ...Object.keys(signs).map((name) => el("option", { value: name, selected: name === (parameters.get("level") ?? "debug") }, `${name} and above`)));
  const q = el("input", { type: "search", onchange: set, placeholder: "text", value: parameters.get("q") ?? "", "data-search": true, "aria-label": "Text" });
  const older = el("button", { type: "button", onclick: () => load(true) }, "Older lines"), body = el("div", { class: "log", role: "log" }), status = el("p", { class: "faint" });
  view.append(el("div", { class: "tools" }, el("label", {}, "File", file), el("label", {}, "Level", level), el("label", {}, "Role", role), el("label", {}, "Text", q), older), status, body);
  let next = 0, isClosed = false, hasOlder = false;
  const line = (one) => el("div", { class: classes[one.level] ?? "" }, el("span", {}, one.time), el("span", {}, `${signs[one.level]} ${one.level}`), el("span", {}, one.role), el("span", { class: "text" }, one.text));
  async function load(isOlder) {
    const wanted = file.value || parameters.get("file") || "";
    const answer = await get("logs", { run, file: wanted, level: level.value, role: role.value, q: q.value, before: isOlder ? next : undefined });
    if (isClosed) return;
    if (file.childElementCount !== answer.files.length) file.replaceChildren(...answer.files.map((name) => el("option", { value: name, selected: name === answer.file }, name)));
    const atEnd = innerHeight + scrollY > document.body.scrollHeight - 60;
    if (isOlder) { body.prepend(...answer.lines.map(line)); hasOlder = true; }
    else { body.replaceChildren(...answer.lines.map(line)); hasOlder = false; if (atEnd) scrollTo(0, document.body.scrollHeight); }
    next = answer.next;
    older.disabled = next === 0;
    status.textContent = answer.files.length ? `${body.childElementCount} lines of ${answer.file}` : "The run has no log files.";
  }
  const reload = () => load(false).catch((error) => body.append(failed(error)));
  const stop = listen(rarely(1500, () => !hasOlder && reload()));
  reload();
  return () => { isClosed = true; stop(); };
}
