#!/usr/bin/env python3
"""Whether RL through a Python environment learns as it does natively: reverse-text as a native, a legacy and a v1 environment with the same rows, the
same model and three seeds, asynchronous as runs usually are. Prints a row of docs/benchmarks.md for each; fails when a mean reward of the last steps
differs from the native one by more than 0.03.

    tests/parity/learning_parity.py [--steps 60] [--seeds 3] [--kinds native legacy v1]

Needs the virtual environments of python/tests/venvs.py. Minutes on two cores."""
import argparse
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests/integration"), str(ROOT / "python/tests")]
import harness
import python_env_test as twins

LAST_STEPS = 10
MARGIN = 0.03


def reward_of(folder, env, model, seed, steps):
    config = twins.rl_toml(folder / "rl.toml", model, env, max_steps=steps, seed=seed)
    text = config.read_text().replace("max_async_level = 0\ndeterministic = true", "max_async_level = 1").replace("batch_size = 8", "batch_size = 64")
    text = text.replace("group_size = 4", "group_size = 8").replace("lr = 1e-3", "lr = 2e-4")
    config.write_text(text.replace("max_num_seqs = 8", "max_num_seqs = 32"))
    harness.prl("rl", "@", config, "--output-dir", folder / "out", timeout=3600)
    rows = [row["reward/all/mean"] for _, row in sorted(harness.metrics(folder / "out").items()) if "reward/all/mean" in row]
    return statistics.mean(rows[:3]), statistics.mean(rows[-LAST_STEPS:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=("native", "legacy", "v1"), default=["native", "legacy", "v1"])
    options = parser.parse_args()
    model = harness.warm_model()
    finals = {}
    with harness.workspace("parity") as folder:
        twins.write_twin(folder)
        rows = folder / "rows.jsonl"
        envs = {"native": f'id = "reverse-text"\nargs = {{ dataset_path = "{rows}", eval_dataset_path = "{rows}" }}'}
        for name, kind in (("twin", "legacy"), ("twin-v1", "v1")):
            envs[kind] = f'id = "{name}"\nname = "reverse-text"\npath = "{folder}:{twins.ENVS}"\npython = "{twins.python_of(kind)}"\nargs = {{ rows = "{rows}" }}'
        print(f"| environment | reward of steps 1 to 3 | of the last {LAST_STEPS} of {options.steps}, by seed | mean |\n|---|---|---|---|")
        for name, env in ((name, env) for name, env in envs.items() if name in options.kinds):
            pairs = []
            for seed in range(options.seeds):
                place = folder / f"{name}-{seed}"
                place.mkdir()
                pairs.append(reward_of(place, env, model, seed, options.steps))
            finals[name] = statistics.mean(last for _, last in pairs)
            print(f"| {name} | {statistics.mean(first for first, _ in pairs):.3f} | {', '.join(f'{last:.3f}' for _, last in pairs)} | {finals[name]:.3f} |", flush=True)
    if "native" not in finals:
        return
    apart = {name: abs(final - finals["native"]) for name, final in finals.items()}
    sys.exit(f"apart from the native one by {apart}" if max(apart.values()) > MARGIN else 0)


if __name__ == "__main__":
    main()
