// Rollouts: a list with filters and search, one rollout with its messages and tokens, groups side by side.
import { el, get, number, bytes, link, note, place, state, listen, rarely, failed, shownRuns } from "./core.js";
import { tokenView } from "./tokens.js";

const fields = ["kind", "from", "to", "env", "stop", "error", "reward_min", "reward_max", "truncated", "order", "group", "q"];
const orders = { newest: "newest first", oldest: "oldest first", reward_down: "best reward", reward_up: "worst reward", longest: "longest", advantage_down: "largest advantage", advantage_up: "smallest advantage" };
const idOf = (entry) => `${entry.kind}.${entry.step}.${entry.row}`;
const parseId = (id) => { const [kind, step, row] = id.split("."); return { kind, step, row }; };
/** The rollouts of the list last shown, for the keys j and k. */
let lastList = [];

export function rollouts(view, parameters) {
  const run = Number(parameters.get("run") ?? state.main);
  if (parameters.get("id")) return oneRollout(view, run, parameters);
  if (parameters.get("compare")) return groupView(view, run, parameters);
  return list(view, run, parameters);
}

function facts(pairs) {
  return el("div", { class: "facts" }, ...pairs.filter(([, value]) => value !== null && value !== undefined && value !== "").map(([name, value]) => el("div", {}, el("b", {}, name), value instanceof Node ? value : String(value))));
}

/** What is special about a rollout, in words and not by colour alone. */
function marks(entry) {
  const all = [];
  if (entry.error) all.push(el("span", { class: "mark bad" }, `✗ ${entry.error}`));
  if (entry.is_damaged) all.push(el("span", { class: "mark bad" }, "✗ unreadable line"));
  if (entry.is_truncated) all.push(el("span", { class: "mark warn" }, "✂ truncated"));
  if (entry.stop) all.push(el("span", { class: "mark faint" }, entry.stop));
  return all.flatMap((mark) => [mark, " "]);
}

function list(view, run, parameters) {
  const inputs = {};
  const set = () => { note(Object.fromEntries(fields.map((name) => [name, inputs[name].value]))); reload(); };
  const choice = (name, options) => (inputs[name] = el("select", { onchange: set, "aria-label": name }, ...options.map(([value, text]) => el("option", { value, selected: (parameters.get(name) ?? "") === value }, text))));
  const entry = (name, type, placeholder) => (inputs[name] = el("input", { type, placeholder, value: parameters.get(name) ?? "", onchange: set, step: "any", "aria-label": `${name.replace("_", " ")}` }));
  // What a link asks for is there from the beginning: the other names come with the first answer.
  const asked = (name) => (parameters.get(name) ? [[parameters.get(name), parameters.get(name)]] : []);
  const env = choice("env", [["", "all environments"], ...asked("env")]), stop = choice("stop", [["", "every stop"], ...asked("stop")]), error = choice("error", [["", "with or without error"], ...asked("error")]);
  const tools = el("div", { class: "tools" },
    Object.assign(entry("q", "search", "text in messages"), { size: 24 }),
    choice("kind", [["", "training and evaluation"], ["train", "training"], ["eval", "evaluation"]]),
    el("label", {}, "Steps", entry("from", "number", "first"), "to", entry("to", "number", "last")),
    env, el("label", {}, "Reward", entry("reward_min", "number", "least"), "to", entry("reward_max", "number", "most")),
    stop, error, choice("truncated", [["", "truncated or not"], ["1", "truncated"], ["0", "not truncated"]]),
    el("label", {}, "Group", entry("group", "number", "id")), choice("order", Object.entries(orders)));
  inputs.q.setAttribute("data-search", "true");
  if (!inputs.order.value) inputs.order.value = "newest";
  const summary = el("p", { class: "faint", role: "status" });
  const body = el("tbody"), more = el("button", { type: "button", hidden: true, onclick: () => load(true) }, "More");
  view.append(tools, summary, el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...["Step", "Environment", "Reward", "Advantage", "Tokens", "Turns", "Group"].map((name, i) => el("th", { class: i === 1 ? "" : "n" }, name)), el("th", {}, "What the model wrote, or where the text was found"))), body)), more);
  let next = 0, shown = 0, abort = null, chosen = -1, hasFacets = "";

  function row(entry) {
    const address = link("rollouts", { run, id: idOf(entry), q: inputs.q.value });
    const open = () => { location.hash = address; };
    return el("tr", { class: "row", tabindex: 0, onclick: (event) => event.target.closest("a") || open(), onkeydown: (event) => event.key === "Enter" && open() },
      el("td", { class: "n" }, el("a", { href: address }, `${entry.step}.${entry.row}`)), el("td", {}, entry.kind === "eval" ? `${entry.env} (eval)` : entry.env),
      el("td", { class: "n" }, number(entry.reward)), el("td", { class: "n" }, entry.advantage === null ? "" : `${entry.advantage > 0 ? "+" : ""}${number(entry.advantage, 3)}`),
      el("td", { class: "n" }, number(entry.tokens)), el("td", { class: "n" }, String(entry.turns)),
      el("td", { class: "n" }, entry.group >= 0 ? el("a", { href: link("rollouts", { run, compare: entry.group, step: entry.step }) }, String(entry.group)) : ""),
      el("td", { class: "text" }, ...marks(entry), entry.preview));
  }
  function fillFacets(facets) {
    const text = JSON.stringify([facets.envs, facets.stops, facets.errors]);
    if (text === hasFacets) return;
    hasFacets = text;
    const fill = (select, first, names) => {
      const value = select.value || parameters.get(Object.keys(inputs).find((name) => inputs[name] === select)) || "";
      select.replaceChildren(...first.map(([v, t]) => el("option", { value: v }, t)), ...names.filter((name) => name).map((name) => el("option", { value: name }, name)));
      select.value = value;
    };
    fill(env, [["", "all environments"]], facets.envs);
    fill(stop, [["", "every stop"]], facets.stops);
    fill(error, [["", "with or without error"], ["*", "any error"]], facets.errors);
  }
  async function load(isMore) {
    abort?.abort();
    abort = new AbortController();
    if (!isMore) { next = 0; shown = 0; chosen = -1; }
    const query = Object.fromEntries(fields.map((name) => [name, inputs[name].value]));
    summary.textContent = query.q ? "searching…" : "reading…";
    const rows = [];
    try {
      // A search answers in pieces; the page asks on until it has a screenful or all was searched.
      for (let round = 0; round < 200; ++round) {
        const answer = await get("rollouts", { run, ...query, offset: next, limit: 50 - rows.length }, abort.signal);
        fillFacets(answer.facets);
        rows.push(...answer.rollouts);
        next = answer.next;
        shown += answer.rollouts.length;
        summary.textContent = query.q
          ? `${shown} found in ${next < 0 ? answer.total : next} of ${answer.total} rollouts${next >= 0 && rows.length < 50 ? ", searching…" : ""}`
          : `${answer.total.toLocaleString("en-US")} rollouts${answer.facets.damaged ? `, ${answer.facets.damaged} lines cannot be read` : ""}`;
        if (next < 0 || rows.length >= 50 || !query.q) break;
      }
    } catch (error) {
      if (error.name !== "AbortError") summary.replaceChildren(failed(error));
      return;
    }
    if (!isMore) { body.replaceChildren(); lastList = []; }
    lastList.push(...rows.map(idOf));
    body.append(...rows.map(row));
    if (!body.childElementCount) body.append(el("tr", {}, el("td", { colspan: 8, class: "note" }, "No rollout matches.")));
    more.hidden = next < 0;
  }
  const reload = () => load(false);
  // New rollouts appear by themselves while the reader is at the top of the newest ones.
  const stopNews = listen(rarely(2000, () => inputs.order.value === "newest" && !inputs.q.value && shown <= 50 && scrollY < 40 && chosen < 0 && reload()));
  const onShortcut = (event) => {
    if (event.detail !== "j" && event.detail !== "k") return;
    const rows = [...body.querySelectorAll("tr.row")];
    chosen = Math.max(0, Math.min(rows.length - 1, chosen + (event.detail === "j" ? 1 : -1)));
    rows[chosen]?.focus();
  };
  view.addEventListener("shortcut", onShortcut);
  reload();
  return () => { stopNews(); abort?.abort(); view.removeEventListener("shortcut", onShortcut); };
}

const textOf = (content) => {
  if (typeof content === "string") return content;
  if (Array.isArray(content)) return content.map((part) => (typeof part === "string" ? part : part?.text ?? `[${part?.type ?? "part"}]`)).join("");
  return content === null || content === undefined ? "" : JSON.stringify(content, null, 1);
};

/** Text with the places where `wanted` stands marked. */
function marked(text, wanted) {
  const pre = el("pre");
  const low = text.toLowerCase(), find = (wanted ?? "").toLowerCase();
  let at = 0;
  if (find && low.length === text.length)
    for (let hit = low.indexOf(find), count = 0; hit >= 0 && count < 500; hit = low.indexOf(find, at), ++count) {
      pre.append(text.slice(at, hit), el("mark", {}, text.slice(hit, hit + find.length)));
      at = hit + find.length;
    }
  pre.append(text.slice(at));
  return pre;
}

function message(one, wanted) {
  if (typeof one !== "object" || one === null) return el("div", { class: "message" }, marked(textOf(one), wanted));
  const role = typeof one.role === "string" ? one.role : "?";
  const parts = [];
  const reasoning = one.reasoning_content ?? one.reasoning;
  let content = textOf(one.content);
  const think = /^\s*<think>([\s\S]*?)<\/think>/.exec(content);
  if (reasoning) parts.push(el("details", { class: "reasoning", open: true }, el("summary", {}, "Reasoning"), marked(textOf(reasoning), wanted)));
  else if (think) {
    parts.push(el("details", { class: "reasoning", open: true }, el("summary", {}, "Reasoning"), marked(think[1], wanted)));
    content = content.slice(think[0].length);
  }
  if (content) parts.push(marked(content, wanted));
  for (const call of Array.isArray(one.tool_calls) ? one.tool_calls : []) {
    const target = typeof call === "object" && call !== null ? call.function ?? call : { name: "", arguments: call };
    parts.push(el("div", { class: "call" }, el("b", {}, `⚙ call ${textOf(target.name)}`), marked(textOf(target.arguments), wanted)));
  }
  const known = ["system", "user", "assistant", "tool"].includes(role) ? role : "";
  return el("div", { class: `message ${known}` }, el("div", { class: "who" }, one.tool_call_id ? `${role} (${one.tool_call_id})` : role), ...parts);
}

/** Messages in order; a very long conversation is drawn in pieces. */
function transcript(messages, wanted) {
  const box = el("div");
  const list = Array.isArray(messages) ? messages : messages === undefined || messages === null ? [] : [messages];
  let at = 0;
  const more = el("button", { type: "button", onclick: () => add() });
  function add() {
    more.remove();
    for (const end = Math.min(list.length, at + 100); at < end; ++at) box.append(message(list[at], wanted));
    if (at < list.length) { more.textContent = `${list.length - at} more messages`; box.append(more); }
  }
  add();
  return box;
}

function details(title, value) {
  if (value === undefined || value === null || (typeof value === "object" && !Object.keys(value).length)) return null;
  return el("details", {}, el("summary", {}, title), el("pre", { class: "plain" }, JSON.stringify(value, null, 2)));
}

function headFacts(run, head, rollout) {
  const timing = rollout?.timing ?? {};
  return facts([
    ["Reward", number(head.reward)], ["Advantage", head.advantage === null ? null : number(head.advantage)], ["Environment", head.env], ["Step", head.step],
    ["Stop", head.stop], ["Error", head.error], ["Turns", head.turns], ["Tokens", number(head.tokens)],
    ["Policy", rollout?.policy ? `v${rollout.policy.start} to v${rollout.policy.end}` : null],
    ["Group", head.group >= 0 ? el("a", { href: link("rollouts", { run, compare: head.group, step: head.step }) }, `${head.group}: side by side`) : null],
    ["Example", head.example >= 0 ? head.example : null], ["Answer", typeof rollout?.answer === "string" ? rollout.answer.slice(0, 500) : null],
    ["Time", timing.total !== undefined ? `${number(timing.total, 3)} s (model ${number(timing.model, 3)}, environment ${number(timing.env, 3)}, scoring ${number(timing.scoring, 3)})` : null],
    ["Truncated", head.is_truncated ? "yes" : null],
  ]);
}

function oneRollout(view, run, parameters) {
  const id = parameters.get("id"), name = parseId(id), wanted = parameters.get("q");
  let isClosed = false;
  const go = (by) => {
    const at = lastList.indexOf(id) + by;
    if (lastList.includes(id) && lastList[at]) location.hash = link("rollouts", { run, id: lastList[at], q: wanted });
  };
  const raw = `/api/raw?${new URLSearchParams({ run, ...name })}`;
  const body = el("div", { "data-rollout": id });
  view.append(el("div", { class: "tools" },
    el("button", { type: "button", onclick: () => history.length > 1 ? history.back() : (location.hash = link("rollouts", { run })) }, "Back (Esc)"),
    el("button", { type: "button", disabled: !lastList.includes(id), onclick: () => go(-1) }, "Previous (k)"), el("button", { type: "button", disabled: !lastList.includes(id), onclick: () => go(1) }, "Next (j)"),
    el("a", { href: link("rollouts", { run, id }) }, `Link to ${id}`), el("a", { href: raw, download: `rollout.${id}.json` }, "Download")), body);
  const onShortcut = (event) => {
    if (event.detail === "j") go(1);
    else if (event.detail === "k") go(-1);
    else if (event.detail === "Escape") location.hash = link("rollouts", { run });
  };
  view.addEventListener("shortcut", onShortcut);
  get("rollout", { run, ...name }).then(({ head, rollout, cut, problem, file }) => {
    if (isClosed) return;
    body.append(headFacts(run, head, rollout));
    if (problem) body.append(el("p", { class: "bad", role: "alert" }, problem));
    if (cut) body.append(el("p", { class: "warn" }, `${cut} texts are cut: the rollout has ${bytes(head.bytes)}. Download it to see all.`));
    const error = rollout?.error;
    if (error) body.append(el("p", { class: "bad" }, `✗ ${typeof error === "string" ? error : `${error.type ?? "error"}: ${error.message ?? JSON.stringify(error)}`}`));
    if (rollout) {
      const tokens = el("section");
      body.append(el("h2", {}, "Transcript"), transcript(rollout.prompt, wanted), transcript(rollout.completion ?? rollout.messages, wanted), tokens);
      tokenView(tokens, run, name);
      for (const extra of [details("Metrics", rollout.metrics), details("Tools", rollout.tool_defs), details("Info", rollout.info), details("Token usage", rollout.token_usage), details("Filters", rollout.filters), details("Timing", rollout.timing)])
        if (extra) body.append(extra);
    }
    body.append(el("p", { class: "faint" }, `${file}, line ${head.row + 1}, ${bytes(head.bytes)}`));
  }).catch((error) => body.append(failed(error)));
  return () => { isClosed = true; view.removeEventListener("shortcut", onShortcut); };
}

function groupView(view, run, parameters) {
  const group = parameters.get("compare"), step = parameters.get("step");
  let isClosed = false;
  const body = el("div", { class: "groups" }), title = el("h2", {}, `Group ${group} of step ${step}`);
  view.append(el("div", { class: "tools" }, el("button", { type: "button", onclick: () => history.back() }, "Back (Esc)"), el("a", { href: link("rollouts", { run, group, from: step, to: step }) }, "As a list")), title, body);
  const onShortcut = (event) => event.detail === "Escape" && history.back();
  view.addEventListener("shortcut", onShortcut);
  (async () => {
    const { rollouts: found } = await get("rollouts", { run, group, from: step, to: step, kind: "train", order: "reward_down", limit: 64 });
    title.textContent = `Group ${group} of step ${step}: ${found.length} rollouts, best first`;
    for (const entry of found) {
      const { head, rollout, problem } = await get("rollout", { run, ...parseId(idOf(entry)) });
      if (isClosed) return;
      if (!body.childElementCount && rollout) view.insertBefore(el("details", { open: true }, el("summary", {}, "Prompt"), transcript(rollout.prompt)), body);
      body.append(el("article", {}, el("h3", {}, el("a", { href: link("rollouts", { run, id: idOf(entry) }) }, `Reward ${number(head.reward)}`), ` advantage ${number(head.advantage, 3)}`), el("p", {}, ...marks(head)), problem ? failed(new Error(problem)) : transcript(rollout?.completion)));
    }
    if (!found.length) body.append(el("p", { class: "note" }, "No rollout of this group was kept."));
  })().catch((error) => view.append(failed(error)));
  return () => { isClosed = true; view.removeEventListener("shortcut", onShortcut); };
}
