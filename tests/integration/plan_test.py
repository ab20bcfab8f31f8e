#!/usr/bin/env python3
"""`prl plan`: its text, JSON and help, and what it says of exchange and gathering beside ranks whose link is held to a rate."""
import json
import os

import harness
from harness import check, prl

os.environ["CUDA_VISIBLE_DEVICES"] = ""


def plan(*arguments):
    return json.loads(prl("plan", *arguments, "--json")[0])


def test_it_prints_what_fits_and_how_long_a_step_takes():
    text, _ = prl("plan", "qwen3-8b", "--card", "h200", "--num-devices", 8, "--seq-len", 8192)
    for wanted in ("it fits", "masters", "compute", "exchange", "gather", "assumed", "989 TFLOP/s"):
        check(wanted in text, f"{wanted!r} is missing:\n{text}")
    for wanted in ("beside compute, not in the sum: exchange", "a layer's gradient travels beside the backward pass of the next one",
                   "new weights travel under the next forward pass"):
        check(wanted in text, f"{wanted!r} is missing:\n{text}")
    slow, fast = (plan("8b", "--card", "h200", "--num-devices", 8, "--assume-flops", flops) for flops in (50, 1e6))
    for part in ("exchange", "gather"):
        together = [p["seconds"][part] + p["beside_compute"][part] for p in (slow, fast)]
        check(abs(together[0] - together[1]) < 0.01 * together[1], f"{part}: {together} s, whatever it is waited for")
    check(slow["seconds"]["exchange"] < 0.6 * fast["seconds"]["exchange"], f"{slow['seconds']} {fast['seconds']}: nothing is beside compute")
    text, _ = prl("plan", "32b", "--card", "h200", "--num-devices", 8, "--seq-len", 4096, "--reshard-after-forward")
    check("a layer's weights travel beside the layer before it" in text, text)
    alone = plan("8b", "--card", "h100", "--seq-len", 4096)
    check(not alone["fits"] and alone["least_devices"] > 1 and "GiB" in alone["missing"], alone)
    rl = plan("4b", "--work", "rl", "--card", "h200", "--num-devices", 2, "--num-infer-devices", 6)
    check({"sampling", "weight_sync", "step"} <= set(rl["seconds"]) and len(rl["memory"]) == 2, rl)
    text, _ = prl("plan", "--help")
    for wanted in ("prl plan qwen3-8b", "exchange (gradients to their owners)", "--assume-bandwidth", "docs/operators/plan.md"):
        check(wanted in text, f"{wanted!r} is missing:\n{text}")
    _, answer = prl("plan", "--card", "h9000", expect=1)
    check("h100, h200" in answer, answer)
    _, answer = prl("plan", "--work", "rl", "--seq-len", 128, expect=1)
    check("must fit into a row" in answer, answer)


def test_a_step_over_a_slow_link_takes_what_the_plan_says():
    with harness.workspace("plan") as folder:
        harness.tiny_model(folder / "model")
        harness.sft_data(folder / "data.jsonl", 64)
        rate, rows, steps = 1e6, 4, 3
        foretold = plan(folder / "model", "--num-devices", 2, "--num-rows", rows, "--seq-len", 256, "--dtype", "float32", "--card", "local",
                        "--assume-bandwidth", rate / 1e9)["seconds"]
        flags = ["--data.name", folder / "data.jsonl", "--data.seq-len", 256, "--data.batch-size", rows, "--max-steps", steps,
                 "--deployment.num-gpus", 2, "--compute.dtype", "float32"]
        prl("sft", "--model.name", folder / "model", *flags, "--output-dir", folder / "slow", env={"PRL_COMM_BANDWIDTH": str(rate)})
        prl("sft", "--model.name", folder / "model", *flags, "--output-dir", folder / "free")
        slow, free = harness.metrics(folder / "slow"), harness.metrics(folder / "free")
        for step in range(2, steps + 1):
            check(slow[step]["loss/mean"] == free[step]["loss/mean"], "a slow link changed the loss")
        # The weights that a run begins with are read whole; from the second step on the forward pass waits for those of the others.
        key = "time/forward_backward"
        for steps, parts in (([1], ("exchange",)), ([2, 3], ("exchange", "gather"))):
            wanted = sum(foretold[part] for part in parts)
            least = min(slow[step][key] for step in steps)
            check(least >= 0.9 * wanted, f"{key} of steps {steps} is {least} s, {parts} alone should take {wanted} s")
            # Beside the link there is work, of which a loaded machine makes more.
            work = max(row[key] for row in free.values())
            check(least <= 1.5 * wanted + 3 * work + 0.5, f"{key} of steps {steps} is {least} s, {parts} {wanted} s and work {work} s were foretold")
        _, answer = prl("sft", "--model.name", folder / "model", *flags, "--output-dir", folder / "bad",
                        env={"PRL_COMM_BANDWIDTH": "fast"}, expect=1)
        check("PRL_COMM_BANDWIDTH" in answer, answer)


if __name__ == "__main__":
    harness.main(test_it_prints_what_fits_and_how_long_a_step_takes, test_a_step_over_a_slow_link_takes_what_the_plan_says)
