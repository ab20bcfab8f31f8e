"""What a rollout costs in a worker: CPU, memory, loop lag, with a model that answers at once (prints rows of docs/performance.md).

    python/tests/measure.py [--rollouts 3000] [--inflight 1000] [--seconds 0] [KIND ...]

KIND is fake, legacy, v1 (all by default); `--seconds` is what the model takes for each call. Replies have 2,000 characters.
"""

import argparse
import asyncio
import sys
import time

import venvs
from peer import Peer, say
from real import ENVS

REPLY = "abcdefghi " * 200
CASES = {
    "fake": (("fake", "fake", {"num_train": 1000}, 1), ("fake", "fake", {"num_train": 1000, "turns": 3}, 3)),
    "legacy": (("prl-reverse-text", "auto", {}, 1), ("prl-guess", "auto", {"max_turns": 3, "num_rows": 1000}, 3), ("prl-calculator", "auto", {"num_rows": 1000}, 2)),
    "v1": (("prl-reverse-text-v1", "auto", {}, 1), ("prl-guess-v1", "auto", {"num_rows": 1000}, 3), ("prl-calculator-v1", "auto", {"num_rows": 1000}, 2)),
}


async def measure(kind, env_id, adapter, env_args, turns, options):
    python = sys.executable if kind == "fake" else venvs.make(kind)
    tool = "calculator_add" if kind == "v1" else "add"

    async def model(call):
        if options.seconds:
            await asyncio.sleep(options.seconds)
        return say(None, tool_calls=[(tool, {"a": 1, "b": 2})]) if call["tools"] and call["turn"] == 0 else say(REPLY)

    peer = Peer(python, model=model, hello={"max_inflight": 65536, "log_level": "error"})
    await peer.start()
    await peer.hello()
    started = time.monotonic()
    config = {"agent": {"max_turns": 3}} if env_id == "prl-guess-v1" else {}
    loaded = await peer.request("load", wait_s=300, env_key="e", env_id=env_id, kind=adapter, env_args=env_args, env_config=config, paths=[str(ENVS), str(ENVS / kind)] if kind != "fake" else [])
    assert loaded["t"] == "loaded", loaded
    load_s = time.monotonic() - started
    rows, offset = [], 0
    while len(rows) < 1000:
        page = await peer.request("tasks", env_key="e", split="train", offset=offset, limit=1000)
        rows, offset = rows + page["tasks"], page["next_offset"]
    warm = await asyncio.gather(*(peer.start_run(f"w{i}", index=i, data=rows[i]["data"]) for i in range(20)))
    assert {terminal["t"] for terminal in warm} == {"result"}, warm[0]
    before = await peer.request("ping")
    lags, peak = [], 0.0

    async def ping():
        nonlocal peak
        while True:
            pong = await peer.request("ping", wait_s=120)
            lags.append(pong["loop_lag_ms"])
            peak = max(peak, pong["rss_mb"])
            await asyncio.sleep(0.25)

    pinging = asyncio.create_task(ping())
    window = asyncio.Semaphore(options.inflight)

    async def play(i):
        async with window:
            terminal = await peer.start_run(f"r{i}", index=i % 1000, data=rows[i % 1000]["data"])
            assert terminal["t"] == "result" and len(terminal["samples"][0]["calls"]) == turns, terminal

    started = time.monotonic()
    await asyncio.gather(*(play(i) for i in range(options.rollouts)))
    seconds = time.monotonic() - started
    pinging.cancel()
    after = await peer.request("ping")
    await peer.stop()
    cpu = after["cpu_s"] - before["cpu_s"]
    lags.sort()
    print(
        f"| {env_id}, {turns} call{'s' * (turns > 1)} | {1000 * cpu / options.rollouts:.1f} ms | {options.rollouts / seconds:.0f}/s | {before['rss_mb']:.0f} MB "
        f"| {max(peak, after['rss_mb']):.0f} MB | {lags[len(lags) // 2]:.0f} ms | {max(lags):.0f} ms | {load_s:.0f} s, {before['cpu_s']:.0f} s |",
        flush=True,
    )


async def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rollouts", type=int, default=3000)
    parser.add_argument("--inflight", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--only", default="", help="environments whose id begins with this")
    options = parser.parse_args()
    print("| environment | CPU a rollout | rate | memory before | at most | loop lag, median | at most | load: wall, CPU |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in options.kinds or CASES:
        for case in CASES[kind]:
            if not case[0].startswith(options.only):
                continue
            await measure(kind, *case, options)


if __name__ == "__main__":
    asyncio.run(main())
