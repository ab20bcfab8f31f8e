#!/usr/bin/env python3
"""The page of `prl rl` and `prl dashboard` in a real browser: Debian's chromium, driven by python3-selenium.

    tests/integration/page_browser/run.py                     installs chromium, chromium-driver and python3-selenium if it must (as root)
    tests/integration/page_browser/run.py --install           only installs them, and says in one line why it cannot
    tests/integration/page_browser/run.py --skip-without-package
    tests/integration/page_browser/run.py --screenshots FOLDER    also writes the pictures of docs/dashboard.md
    tests/integration/page_browser/run.py --measure           1,000,000 points and 100,000 rollouts: times and memory
"""
import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import struct
import subprocess
import sys
import time
import urllib.request

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
PACKAGES = ["chromium", "chromium-driver", "python3-selenium"]
DEBIAN_PYTHON = "/usr/bin/python3"  # python3-selenium is for this one


def has_packages():
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        return False
    probe = [DEBIAN_PYTHON, "-c", "import selenium"]
    return pathlib.Path(DEBIAN_PYTHON).exists() and subprocess.run(probe, capture_output=True).returncode == 0


def install():
    """The reason why the packages cannot be had, or None."""
    if has_packages():
        return None
    if not shutil.which("apt-get") or os.geteuid() != 0:
        return "they are not installed, and only root can install them"
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    for attempt in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"})
        if done.returncode == 0:
            return None
        if attempt == 0:
            subprocess.run(["apt-get", "update", "-qq"], capture_output=True, timeout=200)
    return (done.stderr.strip().splitlines() or ["apt-get failed"])[-1][:200]


def enter():
    """Goes on in Debian's Python with the packages, or exits with 77 and one line."""
    if "--install" in sys.argv:
        if not has_packages():
            print(f"page test: installing {' '.join(PACKAGES)}", flush=True)
            why = install()
            if why:
                print(f"page test: it is skipped: {why}")
        sys.exit(0)
    if importlib.util.find_spec("selenium") and has_packages():
        return
    if "--skip-without-package" in sys.argv and not has_packages():
        print("skipped: chromium, chromium-driver and python3-selenium are not installed; tests/integration/page_browser/run.py installs them")
        sys.exit(77)
    why = install()
    if why:
        print(f"skipped: {' '.join(PACKAGES)}: {why}")
        sys.exit(77)
    os.execv(DEBIAN_PYTHON, [DEBIAN_PYTHON, *sys.argv])


if __name__ == "__main__":
    enter()

from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.options import Options  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402

import exhibit  # noqa: E402
import harness  # noqa: E402
from harness import check  # noqa: E402

PATIENCE = 120  # seconds; reached only by a test that fails


@contextlib.contextmanager
def browser(width=1280, height=900):
    options = Options()
    options.binary_location = shutil.which("chromium")
    for flag in ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars", f"--window-size={width},{height}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    driver.set_page_load_timeout(PATIENCE)
    try:
        yield driver
    finally:
        driver.quit()


def until(what, ask):
    """The first value of ask() that is true; fails naming `what`."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        value = ask()
        if value:
            return value
        time.sleep(0.1)
    raise harness.Failure(f"waited {PATIENCE} s for {what}")


def text_of(driver, selector="main"):
    return driver.execute_script("return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText).join('\\n')", selector)


def no_complaints(driver):
    bad = [entry["message"] for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
    check(not bad, f"the browser complains: {bad[:3]}")


def page_url(log):
    def ask():
        found = re.search(r"page: (http://127\.0\.0\.1:\d+/)", pathlib.Path(log).read_text(errors="replace")) if pathlib.Path(log).exists() else None
        return found and found.group(1)
    return until("the address of the page in the log", ask)


@contextlib.contextmanager
def dashboard(folder, *runs):
    log = folder / "dashboard.log"
    with harness.running("dashboard", *runs, "--port", 0, log=log) as process:
        def ask():
            check(process.poll() is None, f"prl dashboard ended: {log.read_text()[-500:]}")
            found = re.search(r"(http://127\.0\.0\.1:\d+/)", log.read_text()) if log.exists() else None
            return found and found.group(1)
        yield until("prl dashboard", ask), process


def rl_arguments(folder, name, steps, *more):
    config = harness.rl_config(folder / f"{name}.toml", harness.warm_model())
    return ["rl", "@", config, "--output-dir", folder / name, "--max-steps", steps, "--orchestrator.log-tokens", "--trainer.enable-token-export", "--dashboard.port", 0, *more]


def last_step_of_reward(driver):
    label = driver.execute_script("return document.querySelector('section[data-title=\"Reward\"] canvas')?.getAttribute('aria-label') ?? ''")
    found = re.search(r"at step (\d+)", label)
    return int(found.group(1)) if found else 0


def a_live_run_grows(driver, folder):
    log = folder / "first.log"
    # Far more steps than the browser needs, however slow it is; the run is stopped when it has been seen to grow.
    with harness.running(*rl_arguments(folder, "first", 100_000), log=log) as process:
        def shown(least):
            check(process.poll() is None, f"the run ended:\n{log.read_text()[-1500:]}")
            step = last_step_of_reward(driver)
            return step >= least and step
        driver.get(page_url(log))
        early = until("a first point of the reward", lambda: shown(1))
        later = until("a later point of the reward", lambda: shown(early + 1))
        until("a step of which the rest of the test is about", lambda: shown(9))
        # The points of new steps come with the news: curves are not fetched for each of them.
        asked = "return performance.getEntriesByType('resource').filter((one) => one.name.includes('/api/metrics') || one.name.includes('/api/series')).length"
        before, from_step = driver.execute_script(asked), last_step_of_reward(driver)
        until("twelve more points", lambda: shown(from_step + 12))
        num_asked = driver.execute_script(asked) - before
        check(num_asked <= 4, f"twelve new points were asked for in {num_asked} requests")
        label = label_of(driver, "Reward")
        value, step = re.search(r"(\S+) at step (\d+)$", label).groups()
        row = harness.metrics(folder / "first")[int(step)]
        check(abs(float(value) - row["reward/all/mean"]) <= 1e-3, f"{label} is not {row['reward/all/mean']}")
        no_complaints(driver)
        driver.get("about:blank")
        process.terminate()
        process.wait(PATIENCE)
    print(f"live run: reward shown up to step {early}, then {later}")


def single(numbers):
    return struct.unpack(f"{len(numbers)}f", struct.pack(f"{len(numbers)}f", *numbers))


def a_rollout_is_found(driver, folder, url):
    rows = [json.loads(line) for line in (folder / "first/rollouts/step_7/train_rollouts.jsonl").open()]
    index, row = next((i, row) for i, row in enumerate(rows) if row["num_samples"] > 0)
    wanted = row["prompt"][-1]["content"]
    driver.get(f"{url}#/rollouts?q={wanted}&from=7&to=7")
    link = until("the rollout in the list", lambda: driver.execute_script(
        "return [...document.querySelectorAll('tbody a')].map((one) => one.textContent).includes(arguments[0])", f"7.{index}"))
    check(link, "not found")
    driver.execute_script("[...document.querySelectorAll('tbody a')].find((one) => one.textContent === arguments[0]).click()", f"7.{index}")
    until("the transcript", lambda: wanted in text_of(driver, ".message"))
    tokens = [json.loads(line) for line in (folder / "first/rollouts/step_7/train_tokens.jsonl").open()]
    sample = next(one for one in tokens if one["row"] == index)
    until("the tokens", lambda: driver.execute_script("return document.querySelectorAll('.tokens span').length") == len(sample["token_ids"]))
    for stream in ("inference_logprobs", "advantages"):
        driver.execute_script("const s = document.querySelector('select[aria-label=\"Shade tokens by\"]'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))", stream)
        shown = driver.execute_script("return [...document.querySelectorAll('.tokens span')].map((one) => Number(one.dataset.value))")
        # The files hold single-precision numbers.
        check(single(shown) == single(sample[stream]), f"{stream} of the page differ from those on disk")
    # What the trainer exported of tokens that it trained on; shades follow the numbers.
    records = [json.loads(line) for line in (folder / "first/token_exports/step_7/rank_0.jsonl").open()]
    record = next(one for one in records if one["token_ids"] == sample["token_ids"])
    for stream in ("entropy", "importance_ratio"):
        driver.execute_script("const s = document.querySelector('select[aria-label=\"Shade tokens by\"]'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))", stream)
        shown = driver.execute_script("return [...document.querySelectorAll('.tokens span')].map((one) => one.dataset.value === undefined ? null : Number(one.dataset.value))")
        same = [one is None if wanted is None else one is not None and abs(one - wanted) <= 1e-6 * max(1, abs(wanted)) for one, wanted in zip(shown, record[stream], strict=True)]
        check(all(same), f"{stream} of the page differs from the export at token {same.index(False) if False in same else 0}: {shown} and {record[stream]}"[:2000])
        shades = driver.execute_script("return [...document.querySelectorAll('.tokens span')].map((one) => one.style.backgroundColor)")
        check(all(bool(shade) == bool(mask) for shade, mask in zip(shades, record["loss_mask"])), f"{stream}: {sum(map(bool, shades))} tokens are shaded, {sum(record['loss_mask'])} were trained")
    check(driver.execute_script("return [...document.querySelector('select[aria-label=\"Shade tokens by\"]').options].map((one) => one.value)").count("policy_versions") == 1, "versions cannot be shown")
    tip = driver.execute_script("""
        const span = document.querySelectorAll('.tokens span')[arguments[0]], box = span.getBoundingClientRect();
        span.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: box.left + 1, clientY: box.top + 1}));
        return document.getElementById('tip').textContent;""", len(sample["token_ids"]) - 1)
    check(f"id {sample['token_ids'][-1]}" in tip and "Log-probability" in tip, f"hovering shows {tip!r}")
    no_complaints(driver)
    print(f"rollout 7.{index}: {len(sample['token_ids'])} tokens equal those on disk")


def two_runs_are_compared(driver, folder, url):
    driver.get(url)
    driver.refresh()
    label = until("both rewards in one chart", lambda: (lambda text: "first" in text and "second" in text and text)(
        driver.execute_script("return document.querySelector('section[data-title=\"Reward\"] canvas')?.getAttribute('aria-label') ?? ''")))
    last = max(step for step, row in harness.metrics(folder / "first").items() if "reward/all/mean" in row)
    for name, steps in (("first", last), ("second", 5)):
        check(re.search(rf"{name}[^;]* at step {steps}", label), f"{name} is not shown up to step {steps}: {label}")
    driver.get(f"{url}#/config")
    changed = until("the difference of the configurations", lambda: text_of(driver, "tr.changed"))
    check("trainer.optim.lr" in changed and "0.0007" in changed, f"the difference is {changed[:500]}")
    for view, wanted in (("timeline", "Bottleneck"), ("logs", "rl stopped"), ("proofs", "updates shown here were proven"), ("engine", "scheduler/"), ("evals", "No evaluation")):
        driver.get(f"{url}#/{view}")
        until(f"'{wanted}' in the view {view}", lambda: wanted in text_of(driver))
    # What the engine of the live run did, by the last row of its file; a run on a CPU has no plan of memory, and the page says so.
    row = harness.metrics(folder / "first")[last]
    go(driver, url, "engine?run=0", "none for a CPU")
    for key in ("inference/all/num_requests_running/mean", "inference/all/num_requests_waiting/mean", "inference/all/kv_cache_usage/mean"):
        label = until(f"the chart of {key}", lambda: (lambda label: "first" in label and label)(label_of(driver, key)))
        shown = re.search(rf"first[^;]*? (\S+) at step {last}\b", label)
        check(shown and abs(float(shown.group(1).replace(",", "")) - row[key]) <= 1e-3 * max(1, abs(row[key])), f"{key}: {label}, not {row[key]}")
    no_complaints(driver)
    print("two runs compared; every view has its content")


def a_slow_environment_is_named(driver, folder):
    """The timeline of a run whose environment takes its time: by its spans, a lane of its own and the verdict."""
    run = folder / "slow"
    (run / "spans").mkdir(parents=True)
    spans, rows = [], []
    for step in range(1, 9):
        at = 1e9 + 10 * step
        rows += [{"step": step, "role": "trainer", "time": at, "loss/mean": 0.1, "time/step": 10, "time/wait_for_batch": 9, "time/forward_backward": 1},
                 {"step": step, "role": "orchestrator", "time": at - 1, "reward/all/mean": 0.5, "time/step": 10, "time/generate_completions": 9}]
        spans += [("trainer", "waits for a batch", at - 10, at - 1, {"step": step}), ("trainer", "forward and backward", at - 1, at, {"step": step}),
                  ("engine", "steps", at - 10, at - 9, {"busy": 0.5, "steps": 30, "tokens": 900, "running": 4}), ("orchestrator", "collects rollouts", at - 10, at - 1, {"step": step}),
                  ("environment/quick", "waits for the model", at - 10, at - 9, {"own": 0.2, "model": 2.0}), ("environment/sloth", "runs its own code", at - 10, at - 1, {"own": 30.0, "model": 3.0})]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "spans/rl.jsonl").write_text("".join(json.dumps({"lane": lane, "name": name, "begin": begin, "end": end, **more}) + "\n" for lane, name, begin, end, more in spans))
    with dashboard(folder, run) as (url, _):
        driver.get(f"{url}#/timeline")
        driver.get_log("browser")  # what was said of the server before, which is gone
        verdict = until("the verdict", lambda: (lambda text: "Bottleneck" in text and text)(text_of(driver, "[role=status]")))
        check("Bottleneck: the environment sloth" in verdict and "91%" in verdict and "90% of its time" in verdict, f"the verdict is {verdict!r}")
        lanes = driver.execute_script("return document.querySelector('canvas.timeline').dataset.lanes")
        check(lanes == "orchestrator|environment/quick|environment/sloth|engine|trainer", f"the lanes are {lanes}")
        tip = driver.execute_script("""
            const canvas = document.querySelector('canvas.timeline'), box = canvas.getBoundingClientRect();
            canvas.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: box.left + 150 + (box.width - 158) / 2, clientY: box.top + 2 * 34 + 12}));
            return document.getElementById('tip').textContent;""")
        check("environment/sloth" in tip and "own code: 30" in tip, f"pointing at the lane shows {tip!r}")
        no_complaints(driver)
        driver.get("about:blank")
    print("a slow environment has a lane and is named")


def go(driver, url, where, what, selector="main"):
    driver.get(f"{url}#/{where}")
    return until(f"'{what}' at {where}", lambda: (lambda text: what in text and text)(text_of(driver, selector)))


def press(driver, key):
    driver.execute_script("document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true, cancelable: true}))", key)


def label_of(driver, title):
    """What a chart says of itself; charts are fetched when they are on the screen."""
    return driver.execute_script("""
        const canvas = document.querySelector(`section[data-title="${arguments[0]}"] canvas`);
        canvas?.scrollIntoView({block: 'center'});
        return canvas?.getAttribute('aria-label') ?? '';""", title)


def shown_value(driver, title, step, wanted):
    """Waits until the curve of one line ends at a step with the value."""
    def ask():
        found = re.search(r"(\S+) at step (\d+)$", label_of(driver, title))
        return found and int(found.group(2)) == step and abs(float(found.group(1)) - wanted) <= 1e-3 * max(abs(wanted), 1e-6)
    until(f"{title} {wanted:.6g} at step {step}, not {label_of(driver, title)!r}", ask)


def drag(driver, title, begin, end, width):
    """Drags the pointer over a chart from one step to another, of an axis that is `width` steps wide and begins at the step 1."""
    driver.execute_script("""
        const canvas = document.querySelector(`section[data-title="${arguments[0]}"] canvas`), box = canvas.getBoundingClientRect(), room = {left: 56, right: 10};
        const at = (step) => box.left + room.left + ((step - 1) / arguments[3]) * (box.width - room.left - room.right);
        const send = (type, step, buttons) => canvas.dispatchEvent(new PointerEvent(type, {bubbles: true, clientX: at(step), clientY: box.top + 40, buttons}));
        send('pointerdown', arguments[1], 1);
        send('pointermove', (arguments[1] + arguments[2]) / 2, 1);
        send('pointermove', arguments[2], 1);
        send('pointerup', arguments[2], 0);""", title, begin, end, width)


def charts_are_smoothed_and_ranged(driver, url):
    loss = [exhibit.metrics(step)[1]["loss/mean"] for step in range(1, exhibit.STEPS + 1)]

    def smoothed(values, weight):
        total = norm = 0
        for value in values:
            total, norm = weight * total + value, weight * norm + 1
        return total / norm

    def steps():
        return driver.execute_script("return [...document.querySelectorAll('.tools input[type=number]')].map((one) => one.value)")
    driver.get("about:blank")
    go(driver, url, "curves", "Overview")
    shown_value(driver, "Loss", exhibit.STEPS, loss[-1])
    # A range is dragged with the pointer, backwards as well; the axis of what is shown then is the range.
    drag(driver, "Loss", 30, 10, exhibit.STEPS - 1)
    shown_value(driver, "Loss", 30, loss[29])
    check(steps() == ["10", "30"] and driver.execute_script("return /from=10/.test(location.hash) && /to=30/.test(location.hash)"), f"the range is {steps()} in {driver.current_url}")
    shown_value(driver, "Gradient norm", 30, exhibit.metrics(30)[1]["optim/grad_norm"])  # it is that of all charts
    label_of(driver, "Loss")
    driver.execute_script("document.querySelector('section[data-title=\"Loss\"] canvas').focus()")
    press(driver, "Home")
    until("the first step of the range", lambda: "step 10:" in text_of(driver, "section[data-title='Loss'] .where"))
    # A click is no range.
    drag(driver, "Loss", 20, 20, exhibit.STEPS - 1)
    check(steps() == ["10", "30"], f"a click made the range {steps()}")
    smooth = "const range = document.querySelector('input[type=range]'); range.value = arguments[0]; range.dispatchEvent(new Event('input', {bubbles: true}))"
    driver.execute_script(smooth, 60)
    shown_value(driver, "Loss", 30, smoothed(loss[9:30], 0.6))
    check("smoothing=0.6" in driver.current_url, driver.current_url)
    driver.execute_script("document.querySelector('section[data-title=\"Loss\"] canvas').dispatchEvent(new MouseEvent('dblclick', {bubbles: true}))")
    shown_value(driver, "Loss", exhibit.STEPS, smoothed(loss, 0.6))
    check(steps() == ["", ""], f"all steps are {steps()}")
    driver.execute_script(smooth, 0)
    shown_value(driver, "Loss", exhibit.STEPS, loss[-1])
    # Both are in the link.
    driver.get("about:blank")
    go(driver, url, "curves?smoothing=0.9&from=5&to=15", "Overview")
    shown_value(driver, "Loss", 15, smoothed(loss[4:15], 0.9))
    no_complaints(driver)
    print("curves are smoothed, and a range is dragged")


def every_view_says_what_the_files_hold(driver, url):
    last = exhibit.metrics(exhibit.STEPS)
    go(driver, url, "curves", "By environment")
    for family, row, key in (("reward", last[0], "reward/{}/mean"), ("entropy", last[1], "entropy/{}/mean"), ("solve_all", last[0], "solve_all/{}")):
        label = until(f"{family} by environment", lambda: (lambda text: "sums" in text and text)(label_of(driver, f"{family} by environment")))
        for env in ("all", *exhibit.ENVIRONMENTS):
            shown = re.search(rf"\b{env} (\S+) at step {exhibit.STEPS}\b", label)
            check(shown and abs(float(shown.group(1)) - row[key.format(env)]) <= 5e-4 * abs(row[key.format(env)]), f"{family} of {env}: {label}, not {row[key.format(env)]}")
    # A chart of every metric that the run has, whatever its family.
    go(driver, url, "curves?filter=grad_norm", "Found")
    until("the chart of one key", lambda: "at step 40" in label_of(driver, "optim/grad_norm"))

    charts_are_smoothed_and_ranged(driver, url)

    text = go(driver, url, "evals", "±")
    for step, rewards in exhibit.EVAL_REWARDS.items():
        mean = sum(rewards) / len(rewards)
        half = 1.96 * (sum((one - mean) ** 2 for one in rewards) / (len(rewards) - 1) / len(rewards)) ** 0.5
        found = re.search(rf"\b{step}\s+words\s+([\d.]+) ± ([\d.]+)\s+4\b", text)
        check(found and abs(float(found.group(1)) - mean) < 1e-3 and abs(float(found.group(2)) - half) < 0.02, f"step {step}: {mean} ± {half} is not in {text[:800]!r}")

    go(driver, url, "engine", "79.00 GiB")
    for wanted in ("masters", "2.30 GiB", "key-value cache", "12.00 GiB", "7,013 cache blocks", "22.10 GiB", "inference/all/num_requests_running/mean", "inference/all/num_requests_waiting/mean",
                   "inference/all/kv_cache_usage_perc/mean", "inference/all/prefix_cache_hit_rate/mean"):
        until(f"{wanted} in the view of the engine", lambda: wanted in text_of(driver))  # the plan may be there before the charts

    text = go(driver, url, "proofs", "1 of 24 updates could not be proven")
    check(text.count("✗ different") == 1 and text.count("✓ proven") == 23, text[:1500])

    text = go(driver, url, "logs", "Step 40/40")
    files = driver.execute_script("return [...document.querySelector('select[aria-label=File]').options].map((one) => one.value)")
    check(files == ["attempt_2/rl.log", "attempt_2/trainer.log", "attempt_1/rl.log"], f"files {files}")
    for where, wanted in (("logs?level=warning", ["a rollout of sums failed", "is lost"]), ("logs?level=error", ["is lost"]), ("logs?role=inference_1", ["is lost", "is back after"]), ("logs?q=calculator", ["a rollout of sums failed"]),
                          ("logs?file=attempt_1%2Frl.log", ["of the first attempt"])):
        driver.get("about:blank")
        go(driver, url, where, wanted[0])
        lines = driver.execute_script("return [...document.querySelectorAll('.log > div .text')].map((one) => one.textContent)")
        check(len(lines) == len(wanted) and all(part in line for part, line in zip(wanted, lines)), f"{where} shows {lines}")

    text = go(driver, url, "config", "trainer.optim.lr")
    check("0.000001" in text or "1e-6" in text or "1E-6" in text, f"the learning rate is not there: {text[:500]}")
    no_complaints(driver)
    print("curves by environment, evaluations with intervals, memory plan, engines, proofs and logs are as in the files")


def rollouts_are_filtered_and_compared(driver, url):
    every = [exhibit.rollout(step, env, 2 * step + group, row) for step in range(1, exhibit.STEPS + 1) for group, env in enumerate(exhibit.ENVIRONMENTS) for row in range(exhibit.GROUP)]
    evals = sum(map(len, exhibit.EVAL_REWARDS.values()))
    for query, wanted in (("kind=train", len(every)), ("kind=eval", evals), ("kind=train&env=sums", len(every) // 2), ("kind=train&from=3&to=5", 24), ("kind=train&reward_min=0.9", sum(one["reward"] >= 0.9 for one in every)),
                          ("kind=train&stop=max_turns_reached", sum(one["stop_condition"] == "max_turns_reached" for one in every)), ("kind=train&error=*", sum(one["error"] is not None for one in every)),
                          ("kind=train&truncated=1", sum(one["is_truncated"] for one in every)), ("group=14", 4)):
        driver.get("about:blank")
        go(driver, url, f"rollouts?{query}", f"{wanted:,} rollouts", "[role=status]")
    # A link to each: the address of a rollout opens it in a new page.
    driver.get("about:blank")
    text = go(driver, url, "rollouts?id=train.7.5", "Transcript")
    one = exhibit.rollout(7, "sums", 15, 1)
    for wanted in (one["prompt"][1]["content"], one["completion"][0]["reasoning_content"], "⚙ call add", '{"a": 17, "b": 25}', "tool (call_1)", one["completion"][2]["content"], "v5 to v6", "model 1.75"):
        check(wanted in text, f"the transcript lacks {wanted!r}: {text[:1500]}")
    check(driver.execute_script("return [...document.querySelectorAll('main a')].some((one) => one.hash === '#/rollouts?run=0&id=train.7.5')"), "a rollout shows no link to itself")
    go(driver, url, "rollouts?compare=14&step=7", "4 rollouts, best first")
    articles = until("four rollouts side by side", lambda: (lambda all: len(all) == 4 and all)(driver.execute_script("return [...document.querySelectorAll('.groups article')].map((one) => [one.innerText, one.getBoundingClientRect().left, one.getBoundingClientRect().top])")))
    rewards = [float(re.search(r"Reward ([\d.]+)", text).group(1)) for text, _, _ in articles]
    check(rewards == sorted(rewards, reverse=True) == [exhibit.reward_of(7, "words", row) for row in range(4)], f"rewards {rewards}")
    check(len({left for _, left, _ in articles}) == 4 and len({top for _, _, top in articles}) == 1, "they are not side by side")
    no_complaints(driver)
    print("filters count right; a rollout has an address; a group is side by side")


def keys_alone_are_enough(driver, url):
    driver.get("about:blank")
    go(driver, url, "rollouts?kind=train&order=oldest", "320 rollouts", "[role=status]")
    for _ in range(2):
        press(driver, "j")
    check(driver.execute_script("return document.activeElement.matches('tr.row') && document.activeElement.querySelector('a').textContent") == "1.1", "j does not walk down the list")
    press(driver, "k")
    press(driver, "Enter")
    until("a rollout by Enter", lambda: driver.execute_script("return location.hash.includes('id=train.1.0') && document.querySelector('.message') !== null"))
    press(driver, "j")
    until("the next by j", lambda: driver.execute_script("return location.hash.includes('id=train.1.1')"))
    press(driver, "Escape")
    until("the list by Esc", lambda: driver.execute_script("return location.hash === '#/rollouts?run=0'"))
    press(driver, "/")
    check(driver.execute_script("return document.activeElement.matches('[data-search]')"), "/ does not go to the search")
    driver.execute_script("document.activeElement.blur()")
    press(driver, "1")
    until("curves by the key 1", lambda: "at step 40" in label_of(driver, "Loss"))
    press(driver, "l")
    until("a logarithmic axis", lambda: driver.execute_script("return location.hash.includes('log=1')"))
    before = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    press(driver, "t")
    until("the other theme", lambda: driver.execute_script("return getComputedStyle(document.body).backgroundColor") != before)
    press(driver, "t")
    until("the curve in it", lambda: "at step 40" in label_of(driver, "Loss"))
    driver.execute_script("document.querySelector('section[data-title=\"Loss\"] canvas').focus()")
    press(driver, "Home")
    press(driver, "ArrowRight")
    until("values at the marker", lambda: "step 2:" in text_of(driver, "section[data-title='Loss'] .where"))
    press(driver, "?")
    until("the list of keys", lambda: driver.execute_script("return document.getElementById('keys').open"))
    driver.execute_script("document.getElementById('keys').close()")
    no_complaints(driver)
    print("the page is used by keys alone")


def nothing_needs_colour(driver, url, two_runs_url):
    """Lines differ in dashes, states in signs and words, and all text has contrast, light and dark."""
    for theme in ("light", "dark"):
        driver.get("about:blank")
        driver.get(f"{url}?theme={theme}#/curves")
        until("the curves", lambda: "at step 40" in label_of(driver, "reward by environment"))
        worst = driver.execute_script("""
            const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).map(Number).map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
            const probe = document.body.appendChild(document.createElement('span')), style = getComputedStyle(document.documentElement);
            const of = (name) => { probe.style.color = style.getPropertyValue(name); return light(getComputedStyle(probe).color); };
            const ground = of('--ground');
            const ratio = (name) => { const [a, b] = [of(name), ground].sort((x, y) => y - x); return (a + 0.05) / (b + 0.05); };
            const found = Object.fromEntries(['--text', '--faint', '--accent', '--good', '--bad', '--warn', ...[0, 1, 2, 3, 4, 5, 6, 7].map((i) => `--s${i}`)].map((name) => [name, ratio(name)]));
            probe.remove();
            return found;""")
        # WCAG: 4.5 for text, 3 for graphics.
        low = {name: round(value, 2) for name, value in worst.items() if value < (3 if re.fullmatch(r"--s\d", name) else 4.5)}
        check(not low, f"{theme}: too little contrast: {low}")
    driver.get(two_runs_url)
    until("the runs", lambda: driver.execute_script("return document.querySelectorAll('#runs .swatch line').length === 2"))
    dashes = driver.execute_script("return [...document.querySelectorAll('#runs .swatch line')].map((one) => one.getAttribute('stroke-dasharray'))")
    check(len(set(dashes)) == 2, f"two runs have the dashes {dashes}")
    no_complaints(driver)
    print("lines differ in dashes; contrast is enough in light and dark")


def hostile_rollouts(folder):
    """A run whose rollouts try everything: markup, 10 MB, bytes that are no UTF-8, names as long as paths, 100,000 lines."""
    run = folder / "hostile"
    evil = "<script>window.broken = 1</script><img src=x onerror='window.broken = 2'><svg onload='window.broken = 3'>"
    (run / "rollouts/step_1").mkdir(parents=True)
    (run / "rollouts/step_2").mkdir()
    (run / "logs").mkdir()
    (run / "configs").mkdir()
    base = {"task": evil, "prompt": [{"role": evil, "content": evil}], "completion": [{"role": "assistant", "content": evil, "reasoning_content": evil,
            "tool_calls": [{"id": evil, "function": {"name": evil, "arguments": evil}}]}, {"role": "tool", "tool_call_id": evil, "content": [evil, {"type": evil}, None, 7]}],
            "answer": evil, "reward": 0.5, "advantage": -0.5, "group_id": 1, "stop_condition": evil, "error": {"type": evil, "message": evil},
            "metrics": {evil: 1}, "info": {evil: evil}, "policy": {"start": evil, "end": evil}, "timing": evil, "tool_defs": [evil]}
    with (run / "rollouts/step_1/train_rollouts.jsonl").open("wb") as out:
        out.write(json.dumps(base).encode() + b"\n")
        out.write(json.dumps({**base, "completion": [{"role": "assistant", "content": "L" * (10 << 20)}], "error": None}).encode() + b"\n")
        out.write(b'{"task":"bad \xff\xfe","completion":[{"role":"assistant","content":"needle \xc3\x28 \xed\xa0\x80"}],"reward":1}\n')
        out.write(b"this is no JSON\n")
        out.write(json.dumps({**base, "completion": "text", "prompt": 5, "error": evil}).encode() + b"\n")
        out.write(b'{"torn": ')
    with (run / "rollouts/step_2/train_rollouts.jsonl").open("w") as out:
        for i in range(100_000):
            out.write(json.dumps({"task": "many", "completion": [{"role": "assistant", "content": f"answer {i}"}], "reward": i / 100_000, "group_id": i // 8}) + "\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": s, "role": evil, "time": 1e9 + s, f"reward/{evil}/mean": s, "reward/all/mean": s}) + "\n" for s in (1, 2)) + "{\n")
    (run / "logs/rl.log").write_bytes(f"20:00:00 WARNING [{evil[:20]}] {evil}\n".encode() + b"\xff\xfe\n")
    (run / "configs/rl.json").write_text(json.dumps({evil: evil}))
    (run / "logs/weight_proofs.jsonl").write_text(json.dumps({"version": evil, "engine": evil, "is_proven": False}) + "\n")
    return run


def hostile_runs_do_no_harm(driver, folder):
    run = hostile_rollouts(folder)
    driver.get("about:blank")
    driver.get_log("browser")  # the last server's end is no complaint about this one
    with dashboard(folder, run) as (url, process):
        for where, wanted in (("curves", "Reward"), ("rollouts", "100,005 rollouts"), ("rollouts?id=train.1.0", "<script>"), ("rollouts?id=train.1.1", "more bytes"),
                              ("rollouts?id=train.1.2", "needle"), ("rollouts?id=train.1.3", "no JSON"), ("rollouts?id=train.1.4", "Transcript"), ("rollouts?compare=1&step=1", "Group 1"),
                              ("rollouts?q=needle", "1 found in 100005"), ("rollouts?q=answer+19999", "found"), ("config", "<script>"), ("logs", "<script>"), ("proofs", "different"), ("timeline", ""), ("evals", "")):
            driver.get(f"{url}#/{where}")
            until(f"'{wanted}' at {where}", lambda: wanted in text_of(driver))
            check(driver.execute_script("return window.broken === undefined && !document.querySelector('main script, main img, [onload], [onerror]')"), f"{where}: a rollout became markup")
        no_complaints(driver)
        memory = int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path(f"/proc/{process.pid}/status").read_text()).group(1)) // 1024
        check(memory < 200, f"the server took {memory} MB")
    print(f"hostile run: no harm, {memory} MB in the server at most")


def narrow_and_keyboard(driver, url):
    driver.set_window_size(390, 800)
    for view in ("curves", "rollouts", "timeline", "logs", "config"):
        driver.get(f"{url}#/{view}")
        until(f"the view {view}", lambda: driver.execute_script("return document.querySelector('main').childElementCount > 0"))
        check(driver.execute_script("return document.documentElement.scrollWidth <= innerWidth + 1"), f"{view} is wider than a narrow screen")
    driver.set_window_size(1280, 900)
    driver.execute_script("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: '2', bubbles: true}))")
    until("rollouts by the key 2", lambda: driver.execute_script("return location.hash") == "#/rollouts")
    print("narrow screen and keys work")


def screenshots(driver, url, exhibit_url, to):
    """The main views, light and dark: of two runs of a tiny model, and of the exhibit, whose numbers are made up."""
    to.mkdir(parents=True, exist_ok=True)
    driver.set_window_size(1100, 860)
    for name, where_from, where, wanted in (
            ("curves", exhibit_url, "curves?smoothing=0.6", "Reward"), ("comparison", url, "curves", "Reward"), ("rollout", url, "rollouts?id=train.7.0&run=0&color=inference_logprobs", "Shade by"),
            ("rollouts", exhibit_url, "rollouts", "rollouts"), ("group", exhibit_url, "rollouts?compare=14&step=7", "best first"), ("timeline", exhibit_url, "timeline", "Bottleneck"), ("evals", exhibit_url, "evals", "±"),
            ("memory", exhibit_url, "engine", "key-value cache"), ("difference", url, "config", "trainer.optim.lr"), ("logs", exhibit_url, "logs?level=success", "is lost")):
        for theme in ("light", "dark"):
            driver.get("about:blank")
            driver.get(f"{where_from}?theme={theme}#/{where}")
            until(name, lambda: wanted in text_of(driver))
            if name == "rollout":
                driver.execute_script("document.querySelector('.tokens').scrollIntoView({block: 'end'}); scrollBy(0, 40)")
            if name == "memory":
                driver.execute_script("document.querySelector('table[data-plan]').scrollIntoView({block: 'end'}); scrollBy(0, 60)")
            time.sleep(1.5)  # for the picture alone: charts draw after their text
            driver.save_screenshot(str(to / f"page-{name}-{theme}.png"))


def measure(driver, folder):
    """1,000,000 points and 100,000 rollouts of 1 KB: until the page shows them, and what the server holds."""
    run = folder / "large"
    run.mkdir(parents=True)
    keys = [f"key/{k}/mean" for k in range(98)] + ["reward/all/mean", "loss/mean"]
    with (run / "metrics.jsonl").open("w") as out:
        for step in range(1, 10_001):
            out.write(json.dumps({"step": step, "role": "trainer", "time": 1e9 + step, **{key: step * 0.001 + i for i, key in enumerate(keys)}}) + "\n")
    for step in range(1, 101):
        (run / f"rollouts/step_{step}").mkdir(parents=True)
        with (run / f"rollouts/step_{step}/train_rollouts.jsonl").open("w") as out:
            for i in range(1000):
                out.write(json.dumps({"example_id": i, "task": "t", "prompt": [{"role": "user", "content": "q" * 300}], "completion": [{"role": "assistant", "content": f"answer {step}.{i} " + "a" * 500}],
                                      "reward": i / 1000, "group_id": i // 8, "advantage": 0.1, "stop_condition": "stop"}) + "\n")
    size = sum(file.stat().st_size for file in run.rglob("*") if file.is_file()) >> 20
    with dashboard(folder, run) as (url, process):
        begin = time.monotonic()
        driver.get(url)
        until("the reward", lambda: last_step_of_reward(driver) == 10_000)
        first_view = time.monotonic() - begin
        until("all rollouts", lambda: json.load(urllib.request.urlopen(url + "api/runs"))["runs"][0]["rollouts"] == 100_000)
        all_rollouts = time.monotonic() - begin
        begin = time.monotonic()
        driver.get(f"{url}#/rollouts")
        until("the list", lambda: "100,000 rollouts" in text_of(driver))
        listed = time.monotonic() - begin
        begin = time.monotonic()
        driver.get(f"{url}#/rollouts?q=answer+1.999")
        until("the search", lambda: "1 found in 100000" in text_of(driver))
        searched = time.monotonic() - begin
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        held = {key: int(re.search(rf"{key}:\s+(\d+)", status).group(1)) // 1024 for key in ("VmHWM", "VmRSS")}
        row = {"step": 10_001, "role": "trainer", "time": 1e9, "reward/all/mean": 1}
        driver.get(url)
        until("the reward", lambda: last_step_of_reward(driver) == 10_000)
        begin = time.monotonic()
        with (run / "metrics.jsonl").open("a") as out:
            out.write(json.dumps(row) + "\n")
        until("the new point", lambda: last_step_of_reward(driver) == 10_001)
        fresh = time.monotonic() - begin
    print(json.dumps({"mb_on_disk": size, "first_view_s": round(first_view, 2), "all_rollouts_indexed_s": round(all_rollouts, 2), "list_s": round(listed, 2),
                      "search_100k_s": round(searched, 2), "new_point_s": round(fresh, 2), "server_peak_mb": held["VmHWM"], "server_mb": held["VmRSS"]}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--skip-without-package", action="store_true")
    parser.add_argument("--screenshots", type=pathlib.Path)
    parser.add_argument("--measure", action="store_true")
    options = parser.parse_args()
    with harness.workspace("page") as folder, browser() as driver:
        if options.measure:
            return measure(driver, folder)
        a_live_run_grows(driver, folder)
        harness.prl(*rl_arguments(folder, "second", 5, "--trainer.optim.lr", "7e-4"))
        with dashboard(folder, folder / "first", folder / "second") as (url, _):
            a_rollout_is_found(driver, folder, url)
            two_runs_are_compared(driver, folder, url)
            narrow_and_keyboard(driver, url)
            if options.screenshots:
                with dashboard(exhibit.make(folder / "pictures"), folder / "pictures") as (exhibit_url, _):
                    screenshots(driver, url, exhibit_url, options.screenshots)
                    driver.get("about:blank")
                driver.get_log("browser")
        with dashboard(folder, exhibit.make(folder / "exhibit")) as (url, _):
            driver.get("about:blank")
            driver.get_log("browser")
            every_view_says_what_the_files_hold(driver, url)
            rollouts_are_filtered_and_compared(driver, url)
            keys_alone_are_enough(driver, url)
            driver.get("about:blank")
        with dashboard(folder, folder / "first", folder / "exhibit") as (two_runs, _), dashboard(folder / "exhibit", folder / "exhibit") as (url, _):
            driver.get_log("browser")
            nothing_needs_colour(driver, url, two_runs)
            driver.get("about:blank")
        a_slow_environment_is_named(driver, folder)
        hostile_runs_do_no_harm(driver, folder)


if __name__ == "__main__":
    try:
        main()
    except harness.Failure as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        sys.exit(1)
