"""Environments of the v1 API of verifiers (0.4): a Taskset, agents that play it, episodes of traces."""

import contextlib
import math
from collections.abc import Iterator
from types import ModuleType

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils import loaders

from prl_worker.adapters import v1_bridge
from prl_worker.adapters.base import Environment, Info, LoadRequest, Outcome, SplitInfo, new_sample, put_messages
from prl_worker.catalogue import FINGERPRINT_ROWS, fingerprint, page, task_entry
from prl_worker.errors import ConfigError, DescribedError, WorkerError, classify_name
from prl_worker.framing import jsonable
from prl_worker.model_calls import Run

HARNESS_ID = "prl-chat"
MAX_KEPT_ROWS = 10_000  # of an endless task set


class V1Environment(Environment):
    def __init__(self, request: LoadRequest, module: ModuleType) -> None:
        self._calls = request.calls
        self._warnings: list[str] = []
        self._limits = request.limits
        self._has_own_state = False
        v1_bridge.install(HARNESS_ID, request.calls, call_judges=request.judge == "call_back")
        config = self._config(request)
        self._env = loaders.load_environment(config)
        self._task_class = type(self._env.taskset).task_type()
        self._rows = _Rows(self._env.taskset, request.limits)
        if request.state is not None and hasattr(self._env, "load_state_dict"):
            self._env.load_state_dict(request.state)
        self._stack = contextlib.AsyncExitStack()
        self._info = self._describe()

    # Loading

    def _config(self, request: LoadRequest):
        given = dict(request.env_config)
        tools = given.pop("tools", "in_process")
        if tools not in ("in_process", "process"):
            raise ConfigError(f"env_config.tools is {tools!r}, wanted 'in_process' or 'process'")
        self._tools_in_process = tools == "in_process"
        taskset = {**(given.pop("taskset", None) or {}), **request.env_args, "id": request.env_id}
        known = loaders.taskset_config_type(request.env_id).model_fields
        unknown = sorted(set(taskset) - set(known))
        if unknown:
            raise ConfigError(
                f"environment {request.env_id!r} has no argument {', '.join(map(repr, unknown))}; it has {', '.join(sorted(set(known) - {'id'}))}"
            )
        pairing = given.get("id") or ""
        roles = {name: field.default for name, field in _config_class(request.env_id, pairing).model_fields.items() if isinstance(field.default, AgentConfig)}
        for name, default in roles.items():
            given[name] = self._role(request, name, default, dict(given.get(name) or {}))
        # One server for all rollouts: ours never go over its socket, so there is nothing to spread.
        given.setdefault("interception", {"type": "server"})
        try:
            return loaders.resolve_env_config({**given, "taskset": taskset})
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:8])
            raise ConfigError(f"environment {request.env_id!r}: {problems}") from error

    def _role(self, request: LoadRequest, name: str, default: AgentConfig, given: dict) -> dict:
        """A seat that would chat in a program of its own chats in this process; one that has a program of its own keeps it."""
        if "harness" not in given:
            pinned = default.harness.id if default.harness is not None else loaders.default_harness_id(request.env_id)
            if pinned == "null" or (pinned == "bash" and default.harness is None):
                given["harness"] = {"id": HARNESS_ID}
        if "runtime" not in given and default.runtime.type == "prime":
            given["runtime"] = {"type": "subprocess"}
        for ours, theirs in (("max_turns", "max_turns"), ("max_total_completion_tokens", "max_output_tokens"), ("max_seq_len", "max_total_tokens")):
            limit = self._limits.get(ours)
            if limit is not None and limit > 0 and getattr(default, theirs) is None:
                given.setdefault(theirs, limit)
        return given

    async def open(self) -> None:
        await self._stack.enter_async_context(self._env.serving())

    def _describe(self) -> Info:
        first = [self._data(task) for task in self._rows.first(FINGERPRINT_ROWS)]
        count = self._rows.count
        split = SplitInfo(num_tasks=count, infinite=count is None, fingerprint=fingerprint(count, first))
        evaluation = self._rows.count_of("eval")
        splits = {
            "train": split,
            "eval": SplitInfo(num_tasks=evaluation, infinite=evaluation is None, fingerprint=split.fingerprint, same_as_train=True),
        }
        rewards, metrics = self._names()
        seats = [{"name": name, "trainable": True} for name in self._env._agent_specs]
        data = first[0] if first else {}
        return Info(
            kind="v1",
            splits=splits,
            seats=seats,
            reward_names=rewards,
            metric_names=metrics,
            system_prompt=data.get("system_prompt"),
            is_stateful=hasattr(self._env, "state_dict"),
            warnings=self._warnings,
        )

    def _names(self) -> tuple[list[str], list[str]]:
        task = next(iter(self._rows.first(1)), None)
        if task is None:
            return [], []
        rewards = [function.__name__ for function in task.hooks("reward")] + [judge.reward_name for judge in task.plugged_judges()]
        return rewards, [function.__name__ for function in task.hooks("metric")]

    def info(self) -> Info:
        return self._info

    # Tasks

    @staticmethod
    def _data(task) -> dict:
        return task.data.model_dump(mode="json", exclude_none=True)

    def tasks(self, split: str, offset: int, limit: int, with_data: bool) -> tuple[list[dict], bool]:
        count = self._rows.count_of(split)
        end = offset + limit if count is None else min(offset + limit, count)
        entries = page((self._entry(index, task, with_data) for index, task in self._rows.slice(offset, end)), limit)
        return entries, (count is not None and offset + len(entries) >= count) or (not entries and end > offset)

    def _entry(self, index: int, task, with_data: bool) -> dict:
        data = self._data(task)
        prompt = task.data.prompt
        messages = None
        if prompt is not None:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(message) for message in prompt]
            if task.data.system_prompt is not None:
                messages.insert(0, {"role": "system", "content": task.data.system_prompt})
        answer = data.get("answer")
        task_id = task.data.id or task.data.name or str(index)
        return task_entry(index, data, task_id=task_id, prompt=messages, answer=None if answer is None else str(answer), with_data=with_data)

    def _task(self, run: Run):
        if run.data is None:
            return self._rows.at(run.index)
        try:
            data = self._task_class.data_type().model_validate(run.data)
        except ValidationError as error:
            raise WorkerError("bug", f"task.data is no row of this environment: {error.errors()[:3]}", retryable=False) from error
        return self._task_class(data, self._env.config.taskset.task)

    # Rollouts

    async def run(self, run: Run) -> Outcome:
        task = self._task(run)
        context = vf.ModelContext(model=run.model, client=v1_bridge.CLIENT_CONFIG, sampling=vf.SamplingConfig.model_validate(run.sampling))
        seats: list[v1_bridge.Seat] = []

        def on_trace(trace) -> None:
            session = run.session_id if not seats else f"{run.session_id}/{len(seats)}"
            seats.append(v1_bridge.seat(run, trace, session))

        v1_bridge.tools_in_process.set(self._tools_in_process)
        try:
            episode = await self._env.run_slot(self._env.slots(task)[0], context, on_trace=on_trace)
        finally:
            for seat in seats:
                v1_bridge.forget(seat)
        by_id = {seat.trace.id: seat for seat in seats}
        samples = [self._sample(run, by_id[trace.id]) for trace in episode.traces if trace.id in by_id]
        error = episode_error(episode.errors[-1]) if episode.errors and not episode.ok else None
        if not samples:
            raise DescribedError(error or episode_error(None))
        if run.hold:
            raise ConfigError("environments of the v1 API do not score groups: hold has no meaning here")
        record = None
        if run.want_record:
            record = jsonable({**episode.model_dump(mode="json", exclude={"traces"}), "traces": [trace.to_record() for trace in episode.traces]})
        return Outcome(samples=samples, error=error, record=record)

    def _sample(self, run: Run, seat: v1_bridge.Seat) -> dict:
        trace = seat.trace
        calls = run.answered.get(seat.session_id, [])
        sample = new_sample(run, session_id=seat.session_id, seat=trace.agent.name, trainable=bool(trace.agent.trainable and calls))
        rewards = {name: {"score": item.score, "weight": item.weight} for name, item in trace.rewards.items() if item is not None}
        for name, item in rewards.items():
            if not (math.isfinite(item["score"]) and math.isfinite(item["weight"])):
                raise WorkerError("task", f"reward {name} is {item['score']} with the weight {item['weight']}", retryable=False)
        failed = not trace.ok or (trace.is_timeout and not calls)
        sample.update(
            reward=sum(item["score"] * item["weight"] for item in rewards.values()) if rewards else None,
            rewards=rewards,
            metrics={name: value if value is not None and math.isfinite(value) else None for name, value in trace.metrics.items()},
            is_truncated=bool(trace.is_truncated),
            stop_condition=trace.stop_condition,
            ok=not failed,
            timing=_timing(trace, run.model_seconds.get(seat.session_id, 0.0)),
            answer=getattr(trace.task.data, "answer", None) if isinstance(getattr(trace.task.data, "answer", None), str) else None,
            info=jsonable(trace.info),
        )
        if failed:
            sample["error"] = episode_error(trace.errors[-1]) if trace.errors else _timeout_error(trace)
        branches = seat.branches()
        if len(branches) > 1:
            sample["branches"] = branches
        if run.want_messages:
            put_messages(sample, run, *_messages(trace))
        return sample

    def state(self) -> dict | None:
        return jsonable(self._env.state_dict()) if self._info.is_stateful else None

    async def close(self) -> None:
        await self._stack.aclose()


class _Rows:
    """Tasks by index. A finite task set is read once; of an endless one the last rows are kept, and earlier ones are made again."""

    def __init__(self, taskset, limits: dict) -> None:
        self._taskset = taskset
        self._limits = limits
        self._start = 0
        self._kept: list = []
        self._source: Iterator | None = iter(taskset)
        self.count: int | None = None
        if taskset.bounded:
            self._kept = list(self._source)
            self.count = len(self._kept)
        self.count = self.count_of("train")

    def count_of(self, split: str) -> int | None:
        limit = self._limits.get(f"num_{split}")
        own = len(self._kept) if self._taskset.bounded else None
        if limit is None or limit < 0:
            return own
        return limit if own is None else min(own, limit)

    def first(self, count: int) -> list:
        return [task for _, task in self.slice(0, count if self.count is None else min(count, self.count))]

    def slice(self, offset: int, end: int):
        for index in range(offset, end):
            try:
                yield index, self.at(index)
            except IndexError:
                return

    def at(self, index: int):
        if self._taskset.bounded:
            return self._kept[index]
        if index < self._start:
            self._source, self._start, self._kept = iter(self._taskset), 0, []
        while index >= self._start + len(self._kept):
            try:
                self._kept.append(next(self._source))
            except StopIteration:
                raise IndexError(index) from None
            if len(self._kept) > MAX_KEPT_ROWS:
                half = len(self._kept) // 2
                del self._kept[:half]
                self._start += half
        return self._kept[index - self._start]


def _config_class(taskset_id: str, env_id: str):
    return loaders.env_config_type(taskset_id, env_id)


def episode_error(error) -> dict:
    if error is None:
        return {"type": "EnvError", "message": "the episode ran no agent", "class": "task", "retryable": False}
    kind = classify_name(error.type, error.message)
    described = {"type": error.type, "message": error.message[:8192], "class": kind, "retryable": kind in ("provider", "infra", "timeout", "empty")}
    if error.status_code is not None:
        described["status"] = error.status_code
        if kind == "provider" and 400 <= error.status_code < 500 and error.status_code not in (408, 409, 429):
            described["retryable"] = False
    if error.traceback:
        described["traceback"] = error.traceback[-8192:]
    return described


def _timeout_error(trace) -> dict:
    if trace.is_timeout:
        return {"type": "TimeoutError", "message": f"the environment's own time limit: {trace.stop_condition}", "class": "timeout", "retryable": True}
    return {"type": "RolloutError", "message": f"the trace is not ok: {trace.stop_condition}", "class": "task", "retryable": False}


def _messages(trace) -> tuple[list[dict], list[dict], list[dict]]:
    """Prompt and completion of the last path through the trace, and tools."""
    branches = trace.branches
    nodes = branches[-1].nodes if branches else []
    first = next((place for place, node in enumerate(nodes) if node.sampled), len(nodes))
    wire = [message_to_wire(node.message) for node in nodes]
    tools = [{"type": "function", "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters}} for tool in trace.tools]
    return wire[:first], wire[first:], tools


def _timing(trace, model_s: float) -> dict:
    timing = trace.timing
    boot_and_setup = timing.boot.duration + timing.setup.duration
    agent = timing.agent.duration
    total = boot_and_setup + agent + timing.finalize.duration + timing.scoring.duration
    return {
        "start": timing.start,
        "setup_s": round(boot_and_setup, 6),
        "generation_s": round(agent, 6),
        "model_s": round(model_s, 6),
        "env_s": round(max(agent - model_s, 0.0), 6),
        "scoring_s": round(timing.scoring.duration, 6),
        "total_s": round(total, 6),
    }
