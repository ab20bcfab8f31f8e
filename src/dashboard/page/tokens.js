// Tokens of a rollout, shaded by one of the numbers that the run kept for them; the numbers show on hover and focus.
import { el, get, number, note, place, showTip, hideTip } from "./core.js";

const titles = {
  advantages: "Advantage", inference_logprobs: "Log-probability (sampler)", trainer_logprobs: "Log-probability (trainer)", importance_ratio: "Ratio", log_importance_ratio: "Log ratio",
  entropy: "Entropy", mismatch_kl: "Mismatch KL", policy_versions: "Policy version", loss_mask: "Trained", prob_delta: "Probability change", is_masked: "Dropped by the loss", ref_logprobs: "Log-probability (reference)",
};
const first = ["inference_logprobs", "advantages", "importance_ratio", "entropy"];
const pieceCount = 2000;

/** How far a value lies on its scale: -1 to 1 around `middle`. */
function scaleOf(name, values) {
  const finite = values.filter((value) => value !== null);
  if (!finite.length) return () => null;
  const low = Math.min(...finite), high = Math.max(...finite);
  if (name.includes("ratio") && !name.startsWith("log")) return (v) => Math.max(-1, Math.min(1, Math.log(Math.max(v, 1e-9)) / 0.5));
  if (low < 0 && high > 0) return (v) => v / Math.max(-low, high);
  if (high <= 0) return (v) => (low === 0 ? 0 : -Math.sqrt(v / low));
  return (v) => (high === low ? 0.5 : (v - low) / (high - low));
}

export function tokenView(section, run, name) {
  get("tokens", { run, ...name, count: pieceCount }).then(({ samples }) => {
    if (!samples.length) {
      section.append(el("h2", {}, "Tokens"), el("p", { class: "faint" }, name.kind === "eval" ? "Tokens of evaluations are not kept." : "The run kept no numbers per token for this rollout; --orchestrator.log-tokens keeps them."));
      return;
    }
    samples.forEach((sample, index) => draw(section, run, name, sample, index, samples.length));
  }).catch((error) => section.append(el("p", { class: "bad" }, error.message)));
}

function draw(section, run, name, sample, index, count) {
  const names = Object.keys(sample.streams).sort((a, b) => (first.indexOf(a) + 100) % 100 - (first.indexOf(b) + 100) % 100 || a.localeCompare(b));
  const wanted = place().parameters.get("color");
  const select = el("select", { "aria-label": "Shade tokens by", onchange: () => { note({ color: select.value }); shade(); } },
    ...names.map((one) => el("option", { value: one, selected: one === wanted }, titles[one] ?? one)), el("option", { value: "none", selected: wanted === "none" }, "nothing"));
  const legend = el("span", { class: "faint" }), box = el("div", { class: "tokens", "data-sample": index });
  const mask = sample.streams.loss_mask;
  section.append(el("h2", {}, count > 1 ? `Tokens of sample ${sample.sample}` : "Tokens"), el("div", { class: "tools" }, el("label", {}, "Shade by", select), legend), box);
  const describe = (i) => [`token ${sample.first + i}: id ${sample.token_ids[i]} ${JSON.stringify(sample.pieces?.[i] ?? "")}`, ...names.map((one) => `${titles[one] ?? one}: ${number(sample.streams[one][i], 6)}`)].join("\n");
  const spans = sample.token_ids.map((id, i) => {
    const span = el("span", { "data-token": sample.first + i, class: mask && !mask[i] ? "context" : "" }, sample.pieces?.[i] || `[${id}]`);
    return span;
  });
  const at = (event) => Number(event.target.dataset?.token ?? NaN) - sample.first;
  box.addEventListener("pointermove", (event) => (Number.isNaN(at(event)) ? hideTip() : showTip(describe(at(event)), event.clientX, event.clientY)));
  box.addEventListener("pointerleave", hideTip);
  // One stop for the keyboard; arrows walk over the tokens.
  box.tabIndex = 0;
  let focus = -1;
  box.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    event.preventDefault();
    focus = Math.max(0, Math.min(spans.length - 1, focus + (event.key === "ArrowRight" ? 1 : -1)));
    const rect = spans[focus].getBoundingClientRect();
    showTip(describe(focus), rect.left, rect.top);
  });
  box.addEventListener("blur", hideTip);
  box.append(...spans);
  if (sample.first + spans.length < sample.num_tokens) {
    const more = el("button", { type: "button", onclick: async () => {
      more.remove();
      const answer = await get("tokens", { run, ...name, first: sample.first + spans.length, count: pieceCount });
      draw(section, run, name, answer.samples[index], index, count);
    } }, `${sample.num_tokens - sample.first - spans.length} more tokens`);
    section.append(more);
  }
  section.append(el("p", { class: "faint" }, `from ${sample.files.join(", ")}`));

  function shade() {
    const values = sample.streams[select.value];
    const isTrained = (i) => !mask || mask[i];
    const scale = values ? scaleOf(select.value, values.filter((_, i) => isTrained(i))) : null;
    spans.forEach((span, i) => {
      const value = values?.[i];
      const size = scale && value !== null && value !== undefined && isTrained(i) ? scale(value) : null;
      span.style.backgroundColor = size === null ? "" : `rgba(var(${size < 0 ? "--minus" : "--plus"}), ${(0.5 * Math.min(1, Math.abs(size))).toFixed(2)})`;
      span.classList.toggle("low", size !== null && size < -0.5);
      span.classList.toggle("high", size !== null && size > 0.5);
      if (value !== undefined && value !== null) span.dataset.value = value;
      else delete span.dataset.value;
    });
    const trained = values?.filter((value, i) => value !== null && isTrained(i)) ?? [];
    const least = Math.min(...trained), most = Math.max(...trained);
    legend.textContent = trained.length ? `from ${number(least)} to ${number(most)}; dotted line: lowest, full line: highest; pale text: not trained` : "";
  }
  shade();
}
