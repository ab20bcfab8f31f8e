// Proof of sync: for each weight update what the trainer published and what each engine showed to run.
import { el, get, number, state, listen, rarely, failed } from "./core.js";

export function proofs(view) {
  const run = state.main;
  const body = el("div");
  view.append(body);
  async function load() {
    const { proofs: list } = await get("proofs", { run });
    const bad = list.filter((one) => !one.is_proven);
    const rows = list.slice().reverse().slice(0, 1000).map((one) => el("tr", { class: one.is_proven ? "" : "changed" }, el("td", { class: "n" }, `v${one.version}`), el("td", {}, String(one.engine ?? "")),
      el("td", { class: one.is_proven ? "good" : "bad" }, one.is_proven ? "✓ proven" : "✗ different"), el("td", {}, String(one.published_checksum ?? "")), el("td", {}, String(one.engine_checksum ?? "")), el("td", { class: "n" }, number(one.probe_difference)), el("td", { class: "n" }, String(one.num_probe_tokens ?? ""))));
    body.replaceChildren(
      el("p", { role: "status", class: list.length ? (bad.length ? "bad" : "good") : "note" }, list.length ? (bad.length ? `✗ ${bad.length} of ${list.length} updates could not be proven.` : `✓ All ${list.length} updates shown here were proven: the engine's checksum and its log-probabilities of the probe prompt equal the trainer's.`) : "No proof has been recorded: a run records one for each weight update."),
      el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...["Version", "Engine", "Result", "Published checksum", "Engine's checksum", "Largest difference (nats)", "Probe tokens"].map((name) => el("th", {}, name)))), el("tbody", {}, ...rows))));
  }
  const reload = () => load().catch((error) => body.append(failed(error)));
  const stop = listen(rarely(1500, reload));
  reload();
  return stop;
}
