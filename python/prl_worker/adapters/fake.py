"""An environment without any library, for tests of the other side. Everything is a function of the arguments and the index.

A task says "Reverse: <word>"; its answer is the word backwards; the reward is difflib's ratio of the last reply and the
answer. Arguments (`env_args`):

  num_train, num_eval  rows of the splits (default 100, 20; num_train -1: endless)
  turns                model calls of a rollout (default 1)
  seats                names of agents that play one after the other, each in a session of its own (default ["agent"]);
                       those that begin with "_" do not learn
  parallel             calls of one turn sent at the same time (default 1; all but the first are purpose "side")
  group                true: the reward is final after score_group: ratio minus the mean of the group
  latency_s            waits before each call (default 0)
  tools                true: a tool "lookup" is offered; calls of it are answered "found <arguments>"
  judge                true: the reward is 1 if a call of purpose "judge" answers "yes"
  stateful             true: `state` counts finished rollouts, and info.done_before says how many there were before this one
  seed                 of the words (default: that of load)
  image                a data: URI: each message of the user begins with this image (default none)
  row_bytes            padding in each row's data (default 0)
  number               an integer of any size in each row's data and in the tool's schema, which info gives back if the rollout got the row with it
  shuffle_rows         true: rows differ between workers (the process id is mixed in)
  load                 "slow:<seconds>", "raise", "hang", "die": what loading does
  misbehave            {index: what} or {"all": what}; `task.data.misbehave` says the same for one row
  marker               a path: misbehaves only while it does not exist, and makes it first (once in all processes)
  once                 a folder: the same for each task, with a file in it (each task once in all processes)

What: "hang", "block:<seconds>", "die" (exit status 3), "kill" (SIGKILL), "stdout:<bytes>", "stderr:<bytes>", "huge:<bytes>" (result),
"huge_call:<bytes>", "garbage" (bytes that are no frame), "no_json", "oversize" (announces a frame of 4 GiB), "unknown_type",
"double" (two results), "stray_call" (a model call of no run), "forgotten_call" (asks and does not wait), "many_calls:<n>", "raise", "raise_chain",
"exit" (SystemExit), "ignore_cancel", "slow_cancel:<seconds>", "nan", "reward:<number>", "surrogate" (text that is no UTF-8), "memory:<MiB>", "files:<n>", "fork:<n>"
(children that sleep), "thread:<n>", "cpu:<seconds>" (in a thread), "self_cancel", "log:<n>" (records).
"""

import asyncio
import difflib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time

from prl_worker.adapters.base import Environment, Info, LoadRequest, Outcome, SplitInfo, new_sample, put_messages
from prl_worker.catalogue import FINGERPRINT_ROWS, fingerprint, page, task_entry
from prl_worker.errors import ConfigError, ModelCallError, WorkerError, describe
from prl_worker.framing import HEADER
from prl_worker.model_calls import Run

log = logging.getLogger("prl_worker.fake")
starts = logging.getLogger("prl_worker.misbehaving")

_ARGUMENTS = {
    "num_train": 100, "num_eval": 20, "turns": 1, "seats": ["agent"], "parallel": 1, "group": False, "latency_s": 0.0, "tools": False,
    "judge": False, "stateful": False, "seed": None, "image": "", "row_bytes": 0, "number": None, "shuffle_rows": False, "load": "", "misbehave": {}, "marker": "", "once": "",
}  # fmt: skip
_SYSTEM = "Write the word backwards."
_LOOKUP = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}


class FakeFailure(Exception):
    """What "raise" raises."""


def similarity(reply: str, answer: str) -> float:
    return difflib.SequenceMatcher(None, reply.strip(), answer).ratio()


class FakeEnvironment(Environment):
    def __init__(self, request: LoadRequest) -> None:
        unknown = sorted(set(request.env_args) - set(_ARGUMENTS))
        if unknown:
            raise ConfigError(f"environment {request.env_id!r} has no argument {', '.join(map(repr, unknown))}; it has {', '.join(sorted(_ARGUMENTS))}")
        self._args = {**_ARGUMENTS, **request.env_args}
        self._seed = self._args["seed"] if self._args["seed"] is not None else request.seed
        if self._args["shuffle_rows"]:
            self._seed = self._seed * 1_000_003 + os.getpid()
        self._calls = request.calls
        self._connection = request.connection
        self._judge = request.judge
        self._held: dict[str, tuple[str | None, float]] = {}
        self._num_done = (request.state or {}).get("done", 0)
        self._kept: list = []
        for split in ("train", "eval"):
            limit = request.limits.get(f"num_{split}", -1)
            if limit is not None and limit >= 0 and not 0 <= self._args[f"num_{split}"] <= limit:
                self._args[f"num_{split}"] = limit
        self._load_as_told(self._args["load"])

    @staticmethod
    def _load_as_told(what: str) -> None:
        what, _, amount = what.partition(":")
        if what == "slow":
            time.sleep(float(amount))
        elif what == "raise":
            raise FakeFailure("loading was told to fail")
        elif what == "hang":
            time.sleep(3600)
        elif what == "die":
            os._exit(3)

    # Tasks

    def _row(self, split: str, index: int) -> dict:
        rng = random.Random(f"{self._seed}/{split}/{index}")
        word = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(rng.randint(3, 8)))
        row = {"word": word, "answer": word[::-1]}
        if self._args["row_bytes"]:
            row["padding"] = "x" * self._args["row_bytes"]
        if self._args["number"] is not None:
            row["number"] = self._args["number"]
        return row

    def _tools(self) -> list[dict]:
        if not self._args["tools"]:
            return []
        if self._args["number"] is None:
            return [_LOOKUP]
        return [{**_LOOKUP, "function": {**_LOOKUP["function"], "parameters": {"type": "integer", "maximum": self._args["number"]}}}]

    def _count(self, split: str) -> int | None:
        count = self._args[f"num_{split}"]
        return None if count < 0 else count

    def info(self) -> Info:
        splits = {}
        for split in ("train", "eval"):
            count = self._count(split)
            rows = [self._row(split, index) for index in range(FINGERPRINT_ROWS if count is None else min(count, FINGERPRINT_ROWS))]
            splits[split] = SplitInfo(num_tasks=count, infinite=count is None, fingerprint=fingerprint(count, rows))
        return Info(
            kind="fake",
            splits=splits,
            group_scoring=bool(self._args["group"]),
            provides_advantages=bool(self._args["group"]),
            seats=[{"name": seat, "trainable": not seat.startswith("_")} for seat in self._args["seats"]],
            tools=self._tools(),
            reward_names=["similarity"],
            metric_names=["num_turns"],
            system_prompt=_SYSTEM,
            is_stateful=bool(self._args["stateful"]),
        )

    def tasks(self, split: str, offset: int, limit: int, with_data: bool) -> tuple[list[dict], bool]:
        count = self._count(split)
        end = offset + limit if count is None else min(offset + limit, count)
        entries = page((self._entry(split, index, with_data) for index in range(offset, end)), limit)
        return entries, count is not None and offset + len(entries) >= count

    def _entry(self, split: str, index: int, with_data: bool) -> dict:
        row = self._row(split, index)
        return task_entry(index, row, task_id=f"{split}-{index}", prompt=self._prompt(row), answer=row["answer"], with_data=with_data)

    def _said(self, text: str) -> dict:
        image = self._args["image"]
        parts = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": text}]
        return {"role": "user", "content": parts if image else text}

    def _prompt(self, row: dict) -> list[dict]:
        return [{"role": "system", "content": _SYSTEM}, self._said(f"Reverse: {row['word']}")]

    # Rollouts

    async def run(self, run: Run) -> Outcome:
        row = run.data if run.data is not None else self._row(run.split, run.index)
        what = self._what(run, row)
        if what:
            await self._misbehave(run, what)
        samples = []
        for place, seat in enumerate(self._args["seats"]):
            session = run.session_id if place == 0 else f"{run.session_id}/{place}"
            samples.append(await self._play_seat(run, row, seat, session))
        if self._args["group"]:
            if not run.hold:
                raise ConfigError("this environment scores groups: the rollout must hold")
        if run.hold:
            self._held[run.run_id] = (run.group_id, samples[0]["reward"] or 0.0)
        kind, _, amount = what.partition(":")
        if kind == "nan":
            raise WorkerError("task", "reward function similarity gave nan", retryable=False)
        if kind == "reward":
            samples[0]["reward"] = float(amount)
        if kind == "huge":
            samples[0]["info"] = {"padding": "x" * int(amount)}
        if kind == "surrogate":
            samples[0]["info"] = {"text": "half a pair \ud83d here"}
        if kind == "double":
            self._connection.send({"t": "result", "run_id": run.run_id, "env_key": run.env_key, "samples": samples, "task": {"index": run.index}})
        if self._args["number"] is not None and row.get("number") == self._args["number"]:
            samples[0]["info"] = {"number": row["number"]}
        if self._args["stateful"]:
            samples[0]["info"] = {**(samples[0].get("info") or {}), "done_before": self._num_done}
        self._num_done += 1
        return Outcome(samples=samples, is_held=run.hold, record={"row": row} if run.want_record else None)

    def _what(self, run: Run, row: dict) -> str:
        told = self._args["misbehave"]
        what = row.get("misbehave") or told.get(str(run.index)) or told.get("all") or ""
        marker = self._args["marker"] or (self._args["once"] and os.path.join(self._args["once"], f"{run.split}-{run.index}"))
        if what and marker:
            try:
                os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return ""
        return str(what)

    async def _play_seat(self, run: Run, row: dict, seat: str, session: str) -> dict:
        started = time.time()
        trainable = not seat.startswith("_")
        prompt = self._prompt(row)
        messages = list(prompt)
        tools = self._tools()
        stop, truncated, error = "max_turns_reached", False, None
        for turn in range(self._args["turns"]):
            if self._args["latency_s"]:
                await asyncio.sleep(self._args["latency_s"])
            if turn and messages[-1]["role"] == "assistant":
                messages.append(self._said(f"Again, turn {turn + 1}."))
            try:
                reply = await self._ask(run, messages, tools, seat, session, trainable)
            except ModelCallError as caught:
                if caught.kind == "overlong":
                    stop, truncated = "prompt_too_long", True
                else:
                    stop, error = "has_error", describe(caught, with_traceback=False)
                break
            messages.append(reply.message)
            truncated = truncated or reply.finish_reason == "length"
            for call in reply.message.get("tool_calls") or []:
                messages.append({"role": "tool", "tool_call_id": call.get("id"), "content": f"found {call.get('function', {}).get('arguments')}"})
        sample = new_sample(run, session_id=session, seat=seat, trainable=trainable)
        completion = messages[len(prompt) :]
        reward = await self._score(run, completion, row["answer"]) if error is None else None
        now = time.time()
        sample.update(
            reward=reward,
            rewards={} if reward is None else {"similarity": {"score": reward, "weight": 1.0}},
            metrics={"num_turns": float(sample["num_turns"])},
            is_truncated=truncated,
            stop_condition=stop,
            ok=error is None,
            error=error,
            answer=row["answer"],
            timing={"start": started, "total_s": now - started, "generation_s": now - started, "model_s": run.model_seconds.get(session, 0.0)},
            columns={name: row[name] for name in run.columns if name in row},
        )
        if run.want_messages:
            put_messages(sample, run, prompt, completion, tools)
        return sample

    async def _ask(self, run: Run, messages: list, tools: list, seat: str, session: str, trainable: bool):
        asked = {"messages": list(messages), "tools": tools, "sampling": run.sampling, "seat": seat, "session_id": session}
        calls = [self._calls.call(run, trainable=trainable, **asked)]
        calls += [self._calls.call(run, purpose="side", **asked) for _ in range(self._args["parallel"] - 1)]
        return (await asyncio.gather(*calls))[0]

    async def _score(self, run: Run, completion: list, answer: str) -> float:
        said = next((message.get("content") or "" for message in reversed(completion) if message["role"] == "assistant"), "")
        if not self._args["judge"]:
            return similarity(said, answer)
        question = [{"role": "user", "content": f"Is {said!r} the same as {answer!r}? yes or no"}]
        verdict = await self._calls.call(run, messages=question, purpose="judge", model="fake-judge", sampling={"temperature": 0})
        return 1.0 if (verdict.message.get("content") or "").strip().lower().startswith("yes") else 0.0

    async def score_group(self, members: list[dict]) -> list[dict | None]:
        scores: list[float | None] = []
        for member in members:
            sample = member.get("sample")
            if member.get("failed"):
                scores.append(None)
            elif member["run_id"] in self._held:
                scores.append(self._held[member["run_id"]][1])
            elif isinstance(sample, dict) and sample.get("reward") is not None:
                scores.append(float(sample["reward"]))
            else:
                raise WorkerError("infra", f"rollout {member['run_id']} is not held here and came without its sample")
        known = [score for score in scores if score is not None]
        mean = sum(known) / len(known) if known else 0.0
        return [
            None
            if score is None
            else {
                "run_id": member["run_id"],
                "reward": score - mean,
                "rewards": {"similarity": {"score": score - mean, "weight": 1.0}},
                "metrics": {"similarity": score},
                "advantage": score - mean,
            }
            for member, score in zip(members, scores)
        ]

    def release(self, run_ids: list[str] | None, group_id: str | None) -> None:
        for run_id in list(run_ids or ()) + [key for key, (group, _) in self._held.items() if group is not None and group == group_id]:
            self._held.pop(run_id, None)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def state(self) -> dict | None:
        return {"done": self._num_done} if self._args["stateful"] else None

    # Faults

    async def _misbehave(self, run: Run, what: str) -> None:
        kind, _, amount = what.partition(":")
        if kind in ("nan", "reward", "huge", "surrogate", "double"):
            return  # seen in the result
        action = getattr(self, "_do_" + kind, None)
        if action is None:
            raise ConfigError(f"misbehave {what!r} is not known")
        starts.info("misbehaves: %s", what)
        outcome = action(run, amount)
        if outcome is not None:
            await outcome

    async def _do_hang(self, run, amount):
        await asyncio.Event().wait()

    def _do_block(self, run, amount):
        time.sleep(float(amount))

    def _do_die(self, run, amount):
        os._exit(3)

    def _do_kill(self, run, amount):
        os.kill(os.getpid(), signal.SIGKILL)

    def _do_stdout(self, run, amount):
        print("x" * int(amount or 100))
        os.write(1, b"straight to descriptor 1\n")

    def _do_stderr(self, run, amount):
        sys.stderr.write("y" * int(amount or 100) + "\n")

    async def _do_huge_call(self, run, amount):
        await self._calls.call(run, messages=[{"role": "user", "content": "x" * int(amount)}])

    def _do_garbage(self, run, amount):
        self._connection.send_raw(b"\xff" * 64)

    def _do_no_json(self, run, amount):
        self._connection.send_raw(HEADER.pack(7, ord("J")) + b"{broken")

    def _do_oversize(self, run, amount):
        self._connection.send_raw(HEADER.pack(2**32 - 1, ord("J")))

    def _do_unknown_type(self, run, amount):
        self._connection.send({"t": "surprise", "run_id": run.run_id})

    def _do_stray_call(self, run, amount):
        self._connection.send({"t": "model_call", "run_id": "no such run", "call_id": "stray", "session_id": "s", "purpose": "policy", "messages": []})

    def _do_forgotten_call(self, run, amount):
        self._kept.append(asyncio.ensure_future(self._calls.call(run, messages=[{"role": "user", "content": "forgotten"}], purpose="side")))

    async def _do_many_calls(self, run, amount):
        await asyncio.gather(*(self._calls.call(run, messages=[{"role": "user", "content": f"call {i}"}], purpose="side") for i in range(int(amount))))

    def _do_raise(self, run, amount):
        raise FakeFailure("told to fail")

    def _do_raise_chain(self, run, amount):
        try:
            {}["missing"]
        except KeyError as error:
            raise FakeFailure("told to fail with a cause") from error

    def _do_exit(self, run, amount):
        raise SystemExit(4)

    async def _do_ignore_cancel(self, run, amount):
        while not run.is_closed:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                log.debug("a cancellation is ignored")

    async def _do_slow_cancel(self, run, amount):
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(float(amount))

    def _do_memory(self, run, amount):
        block = bytearray(int(amount) * 2**20)
        block[::4096] = b"\1" * len(block[::4096])
        self._kept.append(block)

    def _do_files(self, run, amount):
        self._kept += [os.open(os.devnull, os.O_RDONLY) for _ in range(int(amount))]

    def _do_fork(self, run, amount):
        self._kept += [subprocess.Popen(["sleep", "60"]) for _ in range(int(amount))]

    def _do_thread(self, run, amount):
        for _ in range(int(amount)):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()

    async def _do_cpu(self, run, amount):
        def burn():
            end = time.thread_time() + float(amount)
            while time.thread_time() < end:
                pass

        await asyncio.to_thread(burn)

    async def _do_self_cancel(self, run, amount):
        raise asyncio.CancelledError("the environment's own")

    def _do_log(self, run, amount):
        for i in range(int(amount)):
            log.info("record %d", i)
