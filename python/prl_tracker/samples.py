"""What trackers show beside curves: the configuration, rollouts as tables, distributions."""
import itertools
import json
import pathlib
import random

MAX_ROLLOUTS = 4096  # read of one step
MAX_TEXT = 20_000  # characters of one cell
TABLE_ROWS = 8
COLUMNS = ["step", "task", "example_id", "messages", "input_ids", "reward"]


def run_folder(settings):
    return pathlib.Path(settings["run_folder"])


def state_folder(settings):
    """Where a tracker keeps what it needs after a restart."""
    return run_folder(settings) / settings.get("state", "trackers")


def flat_config(folder, settings, limit):
    """[(dotted key, text)] of the resolved configuration, at most `limit`."""
    try:
        tree = json.loads((folder / settings["config"]).read_text())
    except (OSError, ValueError):
        return []
    out = []

    def walk(prefix, value):
        if isinstance(value, dict):
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else key, item)
        elif value is not None:
            out.append((prefix, value if isinstance(value, str) else json.dumps(value)))
    walk("", tree)
    return out[:limit]


def rollouts(folder, step):
    """Training rollouts of a step; none if the run keeps none."""
    try:
        with open(folder / f"rollouts/step_{step}/train_rollouts.jsonl", encoding="utf-8", errors="replace") as lines:
            for line in itertools.islice(lines, MAX_ROLLOUTS):
                try:
                    yield json.loads(line)
                except ValueError:
                    continue
    except OSError:
        return


def _tokens(folder, step):
    out = {}
    try:
        with open(folder / f"rollouts/step_{step}/train_tokens.jsonl", encoding="utf-8") as lines:
            for line in itertools.islice(lines, MAX_ROLLOUTS):
                one = json.loads(line)
                out.setdefault(one["row"], one["token_ids"])
    except (OSError, ValueError, KeyError):
        pass
    return out


def table(folder, step, ratio=None):
    """Rows of COLUMNS: TABLE_ROWS random rollouts of the step, or that part of all; the same ones whenever it is asked."""
    numbered = list(enumerate(rollouts(folder, step)))
    count = TABLE_ROWS if ratio is None else round(ratio * len(numbered))
    tokens = _tokens(folder, step)
    rows = []
    for index, one in random.Random(step).sample(numbered, min(count, len(numbered))):
        prompt, completion = one.get("prompt") or [], one.get("completion") or []
        messages = (prompt if isinstance(prompt, list) else [prompt]) + (completion if isinstance(completion, list) else [completion])
        rows.append([step, str(one.get("task", "")), str(one.get("example_id", "")), json.dumps(messages, ensure_ascii=False)[:MAX_TEXT],
                     json.dumps(tokens.get(index, []))[:MAX_TEXT], one.get("reward")])
    return rows


def distributions(folder, step):
    """Name -> numbers of all rollouts of the step."""
    out = {"reward": [], "advantage": []}
    for one in rollouts(folder, step):
        for key, values in out.items():
            if isinstance(one.get(key), (int, float)):
                values.append(float(one[key]))
    return {key: values for key, values in out.items() if values}
