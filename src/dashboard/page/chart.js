// Line charts on a canvas: several lines, a band of extremes, a logarithmic axis, a range, a marker for pointer and keyboard.
import { el, number, color, style, dashes } from "./core.js";

export function niceTicks(low, high, count) {
  const ticks = [];
  if (!(high > low) || !Number.isFinite(high - low)) return ticks;
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const width = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= rough) ?? 10 * power;
  for (let at = Math.ceil(low / width); at * width <= high && ticks.length < 100; ++at) ticks.push(at * width || 0);
  return ticks;
}

/** Debiased exponential mean: weight `smoothing` per point back. */
export function smooth(values, smoothing) {
  if (!(smoothing > 0)) return values;
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = smoothing * sum + value;
    weight = smoothing * weight + 1;
    return sum / weight;
  });
}

const room = { left: 56, right: 10, top: 8, bottom: 20 };

export class Chart {
  /** onRange(from, to) or onRange(null, null) when the reader drags a range or wants all. */
  constructor(title, { onRange = () => {}, wide = false } = {}) {
    this.lines = [];
    this.options = { log: false, smoothing: 0 };
    this.onRange = onRange;
    this.marker = null;
    this.drag = null;
    this.canvas = el("canvas", { tabindex: 0, role: "img" });
    this.now = el("span", { class: "now" });
    this.where = el("div", { class: "where", "aria-live": "polite" });
    this.element = el("section", { class: wide ? "chart wide" : "chart", "data-title": title }, el("h3", {}, el("span", {}, title), this.now), this.canvas, this.where);
    this.title = title;
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => { this.marker = null; this.drag = null; this.draw(); });
    this.canvas.addEventListener("pointerdown", (event) => { this.drag = { from: this.stepAt(event) }; });
    this.canvas.addEventListener("pointerup", (event) => this.endDrag(event));
    this.canvas.addEventListener("dblclick", () => this.onRange(null, null));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.canvas);
  }

  close() { this.observer.disconnect(); }

  /** lines: [{name, index, steps, mean, min?, max?, errors?}], `index` chooses colour and dashes, `dash` other dashes. */
  set(lines, options) {
    this.lines = lines;
    this.options = { ...this.options, ...options };
    this.draw();
  }

  frame() {
    const { log, smoothing, from, to } = this.options;
    const shown = this.lines.map((line) => ({ ...line, values: smooth(line.mean, smoothing) }));
    const value = (v) => (log ? (v > 0 ? Math.log10(v) : null) : v);
    let xLow = Infinity, xHigh = -Infinity, yLow = Infinity, yHigh = -Infinity;
    for (const line of shown)
      for (let i = 0; i < line.steps.length; ++i) {
        const v = line.values[i] === null ? null : value(line.values[i]);
        if (v === null || !Number.isFinite(v)) continue;
        xLow = Math.min(xLow, line.steps[i]);
        xHigh = Math.max(xHigh, line.steps[i]);
        const error = line.errors?.[i] ?? 0;
        yLow = Math.min(yLow, log ? v : v - error);
        yHigh = Math.max(yHigh, log ? v : v + error);
      }
    if (xLow > xHigh) [xLow, xHigh, yLow, yHigh] = [0, 1, 0, 1];
    if (Number.isFinite(from)) xLow = from;
    if (Number.isFinite(to)) xHigh = to;
    if (xLow >= xHigh) xHigh = xLow + 1;
    const size = Math.max(Math.abs(yLow), Math.abs(yHigh));
    const isFlat = yHigh - yLow <= 1e-9 * size;  // what remains is rounding
    const gap = !isFlat ? 0.06 * (yHigh - yLow) : 0.05 * size || 0.5;
    yLow -= gap;
    yHigh += gap;
    const width = this.canvas.clientWidth - room.left - room.right, height = this.canvas.clientHeight - room.top - room.bottom;
    return {
      shown, xLow, xHigh, yLow, yHigh, width, height, log, value,
      x: (step) => room.left + ((step - xLow) / (xHigh - xLow)) * width,
      y: (v) => room.top + height - ((v - yLow) / (yHigh - yLow)) * height,
    };
  }

  draw() {
    const { clientWidth, clientHeight } = this.canvas;
    if (clientWidth === 0) return;
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(clientWidth * scale);
    this.canvas.height = Math.round(clientHeight * scale);
    const g = this.canvas.getContext("2d");
    g.scale(scale, scale);
    const f = (this.last = this.frame());
    this.drawAxes(g, f);
    g.save();
    g.beginPath();
    g.rect(room.left, room.top, f.width, f.height);
    g.clip();
    f.shown.forEach((line) => this.drawLine(g, f, line));
    if (this.drag?.to !== undefined) {
      g.fillStyle = style("--accent");
      g.globalAlpha = 0.15;
      g.fillRect(f.x(this.drag.from), room.top, f.x(this.drag.to) - f.x(this.drag.from), f.height);
      g.globalAlpha = 1;
    }
    g.restore();
    this.tell(g, f);
  }

  drawAxes(g, f) {
    g.font = "11px system-ui, sans-serif";
    g.fillStyle = style("--faint");
    g.strokeStyle = style("--line");
    g.lineWidth = 1;
    g.textAlign = "right";
    for (const tick of niceTicks(f.yLow, f.yHigh, 4)) {
      const y = Math.round(f.y(tick)) + 0.5;
      g.beginPath();
      g.moveTo(room.left, y);
      g.lineTo(room.left + f.width, y);
      g.stroke();
      g.fillText(number(f.log ? 10 ** tick : tick, 3), room.left - 5, y + 4);
    }
    g.textAlign = "center";
    for (const tick of niceTicks(f.xLow, f.xHigh, Math.max(2, f.width / 90)))
      if (Number.isInteger(tick)) g.fillText(String(tick), f.x(tick), room.top + f.height + 15);
    if (!this.lines.some((line) => line.steps.length)) g.fillText("no values yet", room.left + f.width / 2, room.top + f.height / 2);
  }

  drawLine(g, f, line) {
    g.strokeStyle = g.fillStyle = color(line.index);
    if (line.min && line.max && !(this.options.smoothing > 0)) {
      g.globalAlpha = 0.18;
      g.beginPath();
      const points = line.steps.map((step, i) => [f.x(step), f.value(line.max[i]), f.value(line.min[i])]).filter(([, a, b]) => a !== null && b !== null);
      points.forEach(([x, high], i) => (i ? g.lineTo(x, f.y(high)) : g.moveTo(x, f.y(high))));
      points.reverse().forEach(([x, , low]) => g.lineTo(x, f.y(low)));
      g.fill();
      g.globalAlpha = 1;
    }
    g.lineWidth = 1.8;
    g.lineJoin = "round";
    g.setLineDash(dashes[(line.dash ?? line.index) % dashes.length]);
    g.beginPath();
    let open = false, count = 0;
    line.steps.forEach((step, i) => {
      const v = line.values[i] === null ? null : f.value(line.values[i]);
      if (v === null) { open = false; return; }
      if (open) g.lineTo(f.x(step), f.y(v));
      else g.moveTo(f.x(step), f.y(v));
      open = true;
      ++count;
    });
    g.stroke();
    g.setLineDash([]);
    line.steps.forEach((step, i) => {
      const error = line.errors?.[i];
      if (count > 60 && error === undefined) return;
      const v = line.values[i] === null ? null : f.value(line.values[i]);
      if (v === null) return;
      if (count < 40) { g.beginPath(); g.arc(f.x(step), f.y(v), 2.2, 0, 7); g.fill(); }
      if (error > 0 && !f.log) {
        g.beginPath();
        g.moveTo(f.x(step), f.y(v - error));
        g.lineTo(f.x(step), f.y(v + error));
        g.stroke();
      }
    });
  }

  /** The values at the marker, or the last ones, in words: what the picture says without seeing it. */
  tell(g, f) {
    const last = f.shown.map((line) => line.values.at(-1)).filter((v) => v !== undefined && v !== null);
    this.now.textContent = last.length === 1 ? number(last[0]) : "";
    const lines = f.shown.filter((line) => line.steps.length);
    this.canvas.setAttribute("aria-label", `${this.title}: ${lines.map((line) => `${line.name} ${number(line.values.at(-1))} at step ${line.steps.at(-1)}`).join("; ") || "no values"}`);
    if (this.marker === null) {
      this.where.textContent = lines.length > 1 ? lines.map((line) => `${line.name} ${number(line.values.at(-1))}`).join(" · ") : "";
      return;
    }
    const x = f.x(this.marker);
    g.strokeStyle = style("--faint");
    g.beginPath();
    g.moveTo(x, room.top);
    g.lineTo(x, room.top + f.height);
    g.stroke();
    const parts = lines.map((line) => {
      const i = nearest(line.steps, this.marker);
      const v = f.value(line.values[i]);
      if (v !== null) {
        g.fillStyle = color(line.index);
        g.beginPath();
        g.arc(f.x(line.steps[i]), f.y(v), 3.5, 0, 7);
        g.fill();
      }
      const spread = line.errors ? ` ± ${number(line.errors[i])}` : line.min ? ` (${number(line.min[i])} to ${number(line.max[i])})` : "";
      return `${lines.length > 1 ? line.name + " " : ""}step ${line.steps[i]}: ${number(line.values[i])}${spread}`;
    });
    this.where.textContent = parts.join(" · ");
  }

  stepAt(event) {
    const f = this.last ?? this.frame();
    const at = (event.clientX - this.canvas.getBoundingClientRect().left - room.left) / f.width;
    return f.xLow + Math.max(0, Math.min(1, at)) * (f.xHigh - f.xLow);
  }
  point(event) {
    this.marker = this.stepAt(event);
    if (this.drag && event.buttons) this.drag.to = this.marker;
    this.draw();
  }
  endDrag(event) {
    const drag = this.drag;
    this.drag = null;
    if (drag?.to === undefined) return;
    const [from, to] = [drag.from, this.stepAt(event)].sort((a, b) => a - b);
    if (Math.round(to) > Math.round(from)) this.onRange(Math.max(0, Math.round(from)), Math.round(to));
    else this.draw();
  }
  key(event) {
    const steps = this.lines.flatMap((line) => line.steps);
    if (!steps.length || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const sorted = [...new Set(steps)].sort((a, b) => a - b);
    const at = this.marker === null ? sorted.length - 1 : nearest(sorted, this.marker);
    const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: sorted.length - 1 }[event.key];
    this.marker = sorted[Math.max(0, Math.min(sorted.length - 1, next))];
    this.draw();
  }
}

function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - sorted[low - 1] < sorted[low] - wanted ? low - 1 : low;
}
