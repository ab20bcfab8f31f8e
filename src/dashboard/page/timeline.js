// The pipeline over time: for each step what each role did and whom it waited for, and who was the slowest.
import { el, get, seconds, number, state, listen, rarely, failed, note, style, showTip, hideTip } from "./core.js";

/** Parts of a role's step in the order in which they happen; those that wait say for whom. */
const parts = {
  orchestrator: [["time/wait_for_ckpt", "waits for new weights from the trainer", true], ["time/generate_completions", "collects rollouts"], ["time/teacher_logprobs", "waits for the teacher", true], ["time/parallel_preprocess", "packs"], ["time/push", "waits for the trainer to take a batch", true], ["time/save_ckpt", "saves"]],
  trainer: [["time/wait_for_batch", "waits for a batch from the orchestrator", true], ["time/load_data", "loads data"], ["time/forward_backward", "forward and backward"], ["time/optimizer", "optimizer"], ["time/broadcast_weights", "publishes weights"], ["time/save_ckpt", "saves"]],
  sft: [["time/forward_backward", "forward and backward"], ["time/optimizer", "optimizer"], ["time/save_ckpt", "saves"]],
};
const rowHeight = 34, axis = 24, labels = 150;
/** What a span of one of the run's processes is called, and whether it is a wait. */
const isWait = (name) => name.startsWith("waits");
const notes = { step: "step", own: "seconds of rollouts in its own code", model: "seconds of rollouts waiting for the model", steps: "steps of the engine", busy: "seconds busy", tokens: "tokens", running: "requests at most" };
const laneOrder = ["orchestrator", "sample queue", "environment/", "engine", "weights", "trainer"];
const orderOf = (lane) => { const at = laneOrder.findIndex((name) => lane.startsWith(name)); return at < 0 ? laneOrder.length : at; };

/** Rows of the picture from the spans that the run's processes wrote: one per lane, with the process where a lane is in several. */
function lanesOf(lanes) {
  const several = new Set(lanes.map((one) => one.lane).filter((lane, at, all) => all.indexOf(lane) !== at));
  return lanes.slice().sort((a, b) => orderOf(a.lane) - orderOf(b.lane) || a.lane.localeCompare(b.lane) || a.process.localeCompare(b.process)).map((one) => ({
    label: several.has(one.lane) ? `${one.lane} (${one.process})` : one.lane, lane: one.lane, spans: one.spans, names: [...new Set(one.spans.map((span) => span.name))],
  }));
}

/** Seconds that the spans cover within [from, to]; with a key, of the numbers that the spans carry, in proportion. */
function covered(spans, test, key) {
  return spans.reduce((sum, span) => sum + (test(span.name) ? (key ? span[key] ?? 0 : span.end - span.begin) : 0), 0);
}

/** Whom the trainer waits for, by what rollouts spend their time on: an environment's own code, or the model. */
function culprit(lanes) {
  const trainer = lanes.filter((one) => one.lane === "trainer").flatMap((one) => one.spans);
  const waits = covered(trainer, isWait), work = covered(trainer, (name) => !isWait(name));
  if (!trainer.length || waits + work <= 0) return null;
  const share = waits / (waits + work);
  const environments = lanes.filter((one) => one.lane.startsWith("environment/")).map((one) => {
    const own = covered(one.spans, () => true, "own"), model = covered(one.spans, () => true, "model");
    return { name: one.lane.slice("environment/".length), own, model, share: own + model > 0 ? own / (own + model) : 0 };
  });
  const own = environments.reduce((sum, one) => sum + one.own, 0), model = environments.reduce((sum, one) => sum + one.model, 0);
  const waited = `The trainer waits ${Math.round(100 * share)}% of its time.`;
  if (share < 0.5) return { text: `Bottleneck: the trainer. It waits ${Math.round(100 * share)}% of its time.` };
  if (!environments.length) return null;
  const slowest = environments.reduce((most, one) => (one.own > most.own ? one : most));
  if (own > model) return { text: `Bottleneck: the environment ${slowest.name}. Its rollouts spend ${Math.round(100 * slowest.share)}% of their time in its own code. ${waited}` };
  return { text: `Bottleneck: the engines. Rollouts spend ${Math.round((100 * model) / (own + model))}% of their time waiting for the model. ${waited}` };
}

/** A role's step as pieces of time, laid out before the moment when its row was written. */
function piecesOf(row) {
  const total = row.parts["time/step"] ?? 0;
  let pieces = (parts[row.role] ?? []).filter(([key]) => row.parts[key] > 0).map(([key, text, isWait]) => ({ key, text, isWait: Boolean(isWait), length: row.parts[key] }));
  // The time until a batch is full counts the wait for new weights in it.
  const wait = row.parts["time/wait_for_ckpt"] ?? 0;
  if (row.role === "orchestrator" && wait > 0)
    pieces = pieces.map((piece) => (piece.key === "time/generate_completions" ? { ...piece, length: Math.max(0, piece.length - wait) } : piece));
  const sum = pieces.reduce((all, piece) => all + piece.length, 0);
  const scale = total > 0 && sum > total ? total / sum : 1;
  const begin = row.time - Math.max(total, sum * scale);
  let at = begin;
  for (const piece of pieces) {
    piece.drawn = piece.length * scale;
    piece.from = at;
    at += piece.drawn;
  }
  return { ...row, begin, end: row.time, total, pieces, rest: Math.max(0, row.time - at), isScaled: scale < 1 };
}

export function timeline(view, parameters) {
  const run = state.main;
  const count = el("select", { "aria-label": "Steps", onchange: () => { note({ steps: count.value }); reload(); } }, ...[5, 10, 20, 50, 100].map((n) => el("option", { value: n, selected: Number(parameters.get("steps") ?? 20) === n }, `last ${n} steps`)));
  const verdict = el("p", { role: "status" }), legend = el("p", { class: "faint" }, "");
  const canvas = el("canvas", { class: "timeline", tabindex: 0, role: "img", "aria-label": "Timeline of the roles" }), table = el("div", { class: "scroll" });
  view.append(el("div", { class: "tools" }, count), verdict, canvas, legend, table);
  let rows = [], lanes = [], boxes = [];

  async function load() {
    const answer = await get("timeline", { run, steps: count.value });
    rows = answer.rows.filter((row) => parts[row.role]).map(piecesOf);
    lanes = lanesOf(answer.lanes);
    legend.textContent = lanes.length ? "Full bars: work, with a colour for each kind of a lane. Hatched bars: waiting for another. Point at one for its numbers." : "Full bars: work. Hatched bars: waiting for another role. Numbers: steps. This run kept no spans of time: a step's parts are laid out in their usual order.";
    draw();
    summarize();
  }
  function drawLanes() {
    const height = lanes.length * rowHeight + axis, width = canvas.clientWidth, scale = devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const g = canvas.getContext("2d");
    g.scale(scale, scale);
    g.font = "12px system-ui, sans-serif";
    boxes = [];
    const all = lanes.flatMap((one) => one.spans);
    const begin = Math.min(...all.map((span) => span.begin)), end = Math.max(...all.map((span) => span.end));
    const x = (time) => labels + ((time - begin) / Math.max(1e-9, end - begin)) * (width - labels - 8);
    canvas.setAttribute("aria-label", `Timeline of ${lanes.map((one) => one.label).join(", ")}`);
    canvas.dataset.lanes = lanes.map((one) => one.label).join("|");
    lanes.forEach((one, at) => {
      const y = at * rowHeight + 4, box = rowHeight - 10;
      g.fillStyle = style("--text");
      g.textAlign = "left";
      g.fillText(one.label, 0, y + box / 2 + 4, labels - 6);
      for (const span of one.spans) {
        const left = x(span.begin), w = Math.max(0.5, x(span.end) - left), colors = [0, 2, 3, 5, 4];
        bar(g, left, y, w, box, isWait(span.name), style(`--s${colors[one.names.indexOf(span.name) % colors.length]}`));
        const more = Object.entries(span).filter(([key]) => !["name", "begin", "end"].includes(key)).map(([key, value]) => `\n${notes[key] ?? key}: ${number(value)}`).join("");
        boxes.push({ left, right: left + w, top: y, bottom: y + box, text: `${one.label}: ${span.name}\n${seconds(span.end - span.begin)}${more}` });
      }
    });
    timeAxis(g, begin, end, width, height);
  }
  function draw() {
    if (lanes.length) return drawLanes();
    const roles = Object.keys(parts).filter((role) => rows.some((row) => row.role === role));
    canvas.style.height = `${roles.length * rowHeight + axis}px`;
    const width = canvas.clientWidth, height = roles.length * rowHeight + axis, scale = devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const g = canvas.getContext("2d");
    g.scale(scale, scale);
    g.font = "12px system-ui, sans-serif";
    boxes = [];
    if (!rows.length) return;
    const begin = Math.min(...rows.map((row) => row.begin)), end = Math.max(...rows.map((row) => row.end));
    const x = (time) => labels + ((time - begin) / Math.max(1e-9, end - begin)) * (width - labels - 8);
    roles.forEach((role, at) => {
      const y = at * rowHeight + 4, box = rowHeight - 10;
      g.fillStyle = style("--text");
      g.textAlign = "left";
      g.fillText(role, 0, y + box / 2 + 4);
      for (const row of rows.filter((one) => one.role === role)) {
        for (const piece of row.pieces) {
          const left = x(piece.from), w = Math.max(0.5, x(piece.from + piece.drawn) - left);
          fill(g, left, y, w, box, piece, role);
          boxes.push({ left, right: left + w, top: y, bottom: y + box, text: `${role}, step ${row.step}\n${piece.text}: ${seconds(piece.length)}\nwhole step: ${seconds(row.total)}${row.isScaled ? "\n(parts overlap and are drawn shorter)" : ""}` });
        }
        g.strokeStyle = style("--text");
        g.beginPath();
        g.moveTo(x(row.end), y - 3);
        g.lineTo(x(row.end), y + box + 3);
        g.stroke();
        if (x(row.end) - x(row.begin) > g.measureText(String(row.step)).width + 8) {
          // A block of the page's ground around the number: it is read on every colour and on hatching.
          g.fillStyle = style("--ground");
          g.fillRect(x(row.end) - g.measureText(String(row.step)).width - 6, y, g.measureText(String(row.step)).width + 5, 13);
          g.fillStyle = style("--text");
          g.textAlign = "right";
          g.fillText(String(row.step), x(row.end) - 3, y + 10);
        }
      }
    });
    timeAxis(g, begin, end, width, height);
  }
  function timeAxis(g, begin, end, width, height) {
    g.fillStyle = style("--faint");
    g.textAlign = "center";
    for (let i = 0; i <= 5; ++i) {
      const at = labels + (i / 5) * (width - labels - 8);
      g.fillText(`${i ? "+" : ""}${seconds(((end - begin) * i) / 5)}`, Math.min(width - 24, Math.max(labels + 16, at)), height - 6);
    }
  }
  function fill(g, left, top, width, height, piece, role) {
    const list = parts[role].filter(([, , isWait]) => !isWait).map(([key]) => key);
    bar(g, left, top, width, height, piece.isWait, style(`--s${[0, 2, 3, 5, 4][Math.max(0, list.indexOf(piece.key)) % 5]}`));
  }
  function bar(g, left, top, width, height, isHatched, color) {
    g.fillStyle = isHatched ? style("--raised") : color;
    g.fillRect(left, top, width, height);
    if (!isHatched) return;
    g.save();
    g.beginPath();
    g.rect(left, top, width, height);
    g.clip();
    g.strokeStyle = style("--bad");
    for (let at = left - height; at < left + width; at += 7) { g.beginPath(); g.moveTo(at, top + height); g.lineTo(at + height, top); g.stroke(); }
    g.restore();
  }
  /** Who waits how much, in words and as a table: the bottleneck is the role that waits least. */
  function summarize() {
    const roles = [...new Set(rows.map((row) => row.role))];
    const sums = roles.map((role) => {
      const own = rows.filter((row) => row.role === role);
      const total = own.reduce((sum, row) => sum + row.total, 0), wait = own.reduce((sum, row) => sum + row.pieces.reduce((part, piece) => part + (piece.isWait ? piece.drawn : 0), 0), 0);
      return { role, total, wait, share: total > 0 ? wait / total : 0, own };
    });
    const loop = sums.filter(({ role }) => role !== "sft" && role in parts).sort((a, b) => a.share - b.share);
    const found = culprit(lanes);
    verdict.textContent = found ? found.text : !rows.length ? "No step has been timed yet." : loop.length < 2 ? "" : `Bottleneck: the ${loop[0].role}. It waits ${Math.round(100 * loop[0].share)}% of its time, the ${loop.at(-1).role} ${Math.round(100 * loop.at(-1).share)}%.`;
    table.replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...["Role", "Part", "Mean per step", "Share of its time"].map((name, i) => el("th", { class: i > 1 ? "n" : "" }, name)))), el("tbody", {}, ...sums.flatMap(({ role, own, total }) =>
      (parts[role] ?? []).map(([key, text, isWait]) => {
        const sum = own.reduce((all, row) => all + (row.pieces.find((piece) => piece.key === key)?.length ?? 0), 0);
        return sum > 0 ? el("tr", {}, el("td", {}, role), el("td", {}, text), el("td", { class: "n" }, seconds(sum / own.length)), el("td", { class: "n" }, `${number((100 * sum) / Math.max(total, 1e-9), 3)}%`)) : null;
      }).filter((row) => row)))));
  }
  const onMove = (event) => {
    const rect = canvas.getBoundingClientRect(), px = event.clientX - rect.left, py = event.clientY - rect.top;
    const hit = boxes.find((box) => px >= box.left && px <= box.right && py >= box.top && py <= box.bottom);
    if (hit) showTip(hit.text, event.clientX, event.clientY);
    else hideTip();
  };
  canvas.addEventListener("pointermove", onMove);
  canvas.addEventListener("pointerleave", hideTip);
  const reload = () => load().catch((error) => view.append(failed(error)));
  const stop = listen(rarely(1500, reload));
  addEventListener("resize", draw);
  reload();
  return () => { stop(); removeEventListener("resize", draw); };
}
