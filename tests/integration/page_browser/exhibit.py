"""A run that was never trained: what the page has views for and a run on a CPU does not have all of. Two environments, evaluations, tools and
reasoning, a plan of a GPU's memory, lanes of four processes, two attempts of logs. The numbers are made up; the files are as prl writes them."""
import json
import math
import time

STEPS, GROUP = 40, 4
ENVIRONMENTS = ("words", "sums")
EVAL_REWARDS = {10: (0, 0, 1, 0), 20: (0, 1, 1, 0), 30: (1, 1, 1, 0)}
GIB = 1 << 30
BEGIN = int(time.time()) - 10 * STEPS


def reward_of(step, env, row):
    """Rises over the steps, sooner in words than in sums; within a group it falls from row to row."""
    middle = 1 / (1 + math.exp(-(step - (12 if env == "words" else 26)) / 5))
    return round(max(0, min(1, middle + 0.3 * math.sin(1.7 * step) * middle * (1 - middle) + 0.15 * (1.5 - row))), 4)


def rollout(step, env, group, row):
    reward = reward_of(step, env, row)
    answer = "olleh" if env == "words" else str(40 + row)
    question = "Turn 'hello' around." if env == "words" else "How much is 17 + 25? Use the calculator."
    steps = [{"role": "assistant", "reasoning_content": "I take the letters from the last to the first." if env == "words" else "The calculator adds.", "content": "", "tool_calls": [
        {"id": "call_1", "function": {"name": "reverse" if env == "words" else "add", "arguments": json.dumps({"text": "hello"} if env == "words" else {"a": 17, "b": 25})}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "olleh" if env == "words" else "42"}, {"role": "assistant", "content": f"It is {answer}."}]
    is_cut = (step + row) % 11 == 0
    return {"example_id": group, "task": env, "prompt": [{"role": "system", "content": "Answer in one sentence."}, {"role": "user", "content": question}], "completion": steps, "answer": "olleh" if env == "words" else "42",
            "reward": reward, "advantage": round(reward - 0.5, 4), "group_id": group, "num_turns": 2, "stop_condition": "max_turns_reached" if is_cut else "stop", "is_truncated": is_cut,
            "error": {"type": "ToolError", "message": "the calculator did not answer"} if row == 3 and step % 13 == 0 else None,
            "metrics": {"exact": reward}, "policy": {"start": step - 2, "end": step - 1}, "timing": {"total": 2.5, "model": 1.75, "env": 0.5, "scoring": 0.25}, "token_usage": {"output_tokens": 20 + step + row}}


def metrics(step):
    at = BEGIN + 10 * step
    means = {env: sum(reward_of(step, env, row) for row in range(GROUP)) / GROUP for env in ENVIRONMENTS}
    falling = math.exp(-step / 25)
    orchestrator = {"reward/all/mean": sum(means.values()) / 2, **{f"reward/{env}/mean": value for env, value in means.items()}, "solve_all/all": means["words"] ** 4, **{f"solve_all/{env}": value ** 4 for env, value in means.items()},
                    "decode_len/all/mean": 20 + step + 1.5, "is_truncated/all/mean": 1 / 11, "off_policy_level/all/mean": 1 + 0.4 * math.sin(step), "time/step": 10, "time/generate_completions": 8.5, "time/wait_for_ckpt": 0.5,
                    "scheduler/inflight_rollouts": 16 + 8 * math.sin(step / 3), "inference/all/num_requests_running/mean": 14 + 6 * math.sin(step / 3), "inference/all/num_requests_waiting/mean": max(0, 6 * math.sin(step / 3)),
                    "inference/all/kv_cache_usage_perc/mean": 0.4 + step / 100, "inference/all/prefix_cache_hit_rate/mean": 0.6}
    trainer = {"loss/mean": 0.05 * falling * math.cos(step), "entropy/all/mean": 0.3 + 1.5 * falling, **{f"entropy/{env}/mean": (0.3 + 1.5 * falling) * scale for env, scale in zip(ENVIRONMENTS, (0.9, 1.1))},
               "mismatch_kl/all/mean": 0.002 * (1 + 0.5 * math.sin(step / 2)), "optim/grad_norm": 0.8 + falling, "optim/lr": 1e-6 * min(1, step / 5), "perf/throughput": 18000 + 600 * math.sin(step), "perf/mfu": 31 + math.sin(step),
               "perf/peak_memory": 45.8, "time/step": 10, "time/wait_for_batch": 6.5, "time/forward_backward": 3, "time/broadcast_weights": 0.3}
    return [{"step": step, "role": role, "time": at + late, **row} for role, late, row in (("orchestrator", 0, orchestrator), ("trainer", 1, trainer))]


def spans(step):
    at = BEGIN + 10 * step
    return {"trainer": [("trainer", "waits for a batch", at - 9, at - 2.5, {"step": step}), ("trainer", "forward and backward", at - 2.5, at + 0.5, {"step": step}), ("trainer", "publishes weights", at + 0.5, at + 0.8, {"step": step})],
            "orchestrator": [("orchestrator", "waits for new weights", at - 9, at - 8.5, {"step": step}), ("orchestrator", "collects rollouts", at - 8.5, at, {"step": step}),
                             ("environment/words", "runs its own code", at - 8, at - 6, {"own": 4, "model": 9}), ("environment/words", "waits for the model", at - 6, at - 3, {"own": 1, "model": 20}),
                             ("environment/sums", "waits for the model", at - 8, at - 2, {"own": 2, "model": 44}), ("weights", "takes a version", at - 8.8, at - 8.6, {"step": step})],
            "inference": [("engine", "steps", at - 8.4, at - 1, {"busy": 7, "steps": 300, "tokens": 21000, "running": 20})], "inference_1": [("engine", "steps", at - 8.4, at - 0.5, {"busy": 7.4, "steps": 310, "tokens": 22000, "running": 22})]}


def make(run):
    """Writes the run into a new folder."""
    for folder in ("configs", "memory", "spans", "logs/attempt_1", "logs/attempt_2"):
        (run / folder).mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for step in range(1, STEPS + 1) for row in metrics(step)))
    for step in range(1, STEPS + 1):
        (run / f"rollouts/step_{step}").mkdir(parents=True)
        with (run / f"rollouts/step_{step}/train_rollouts.jsonl").open("w") as out:
            for group, env in enumerate(ENVIRONMENTS):
                for row in range(GROUP):
                    out.write(json.dumps(rollout(step, env, 2 * step + group, row)) + "\n")
        if step in EVAL_REWARDS:
            with (run / f"rollouts/step_{step}/eval_rollouts.jsonl").open("w") as out:
                for row, reward in enumerate(EVAL_REWARDS[step]):
                    out.write(json.dumps({**rollout(step, "words", row, row), "reward": reward, "advantage": None, "is_truncated": False, "stop_condition": "stop", "error": None}) + "\n")
    for process in ("trainer", "orchestrator", "inference", "inference_1"):
        lines = [json.dumps({"lane": lane, "name": name, "begin": begin, "end": end, **more}) for step in range(STEPS - 7, STEPS + 1) for lane, name, begin, end, more in spans(step)[process]]
        (run / f"spans/{process}.jsonl").write_text("\n".join(lines) + "\n")
    parts = {"masters": 2.3, "gradients": 2.3, "optimizer": 4.6, "weights": 1.2, "activations": 21.4, "key-value cache": 12.0, "engine": 1.4}
    plan = {"process": "rl", "available": 79 * GIB, "total": round(sum(parts.values()) * GIB), "num_kv_blocks": 7013, "parts": [{"name": name, "bytes": round(size * GIB)} for name, size in parts.items()], "host": [{"name": "optimizer", "bytes": 9 * GIB}]}
    plan["parts"][4]["foretold"] = round(22.1 * GIB)
    (run / "memory/rl.json").write_text(json.dumps(plan))
    (run / "configs/rl.json").write_text(json.dumps({"max_steps": STEPS, "trainer": {"optim": {"lr": 1e-6}}, "orchestrator": {"batch_size": 8, "group_size": GROUP}}))
    (run / "run.json").write_text(json.dumps({"format": "prl-run", "version": 1, "id": "exhibit", "kinds": ["rl"], "metrics": "metrics.jsonl"}))
    (run / "logs/attempt_1/rl.log").write_text("09:00:00    INFO of the first attempt\n")
    lines = [f"10:{step:02d}:00 SUCCESS [trainer] Step {step}/{STEPS} | Reward: {metrics(step)[0]['reward/all/mean']:.4f}" for step in range(1, STEPS + 1)]
    lines[6:6] = ["10:06:30 WARNING [orchestrator] a rollout of sums failed: the calculator did not answer"]
    lines[20:20] = ["10:20:10   ERROR [inference_1] is lost", "10:20:12    INFO [inference_1] is back after 2 s"]
    (run / "logs/attempt_2/rl.log").write_text("\n".join(lines) + "\n")
    (run / "logs/attempt_2/trainer.log").write_text("10:00:00    INFO of the trainer alone\n")
    (run / "logs/latest").symlink_to("attempt_2")
    proofs = [{"version": step, "engine": f"http://127.0.0.1:{8000 + engine}", "published_checksum": f"{7 * step:016x}", "engine_checksum": f"{7 * step + (step == 9 and engine):016x}", "probe_difference": 0.0, "num_probe_tokens": 64,
               "is_proven": not (step == 9 and engine)} for step in range(1, 13) for engine in (0, 1)]
    (run / "logs/weight_proofs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in proofs))
    return run
