"""Environments of the legacy API of verifiers, 0.1.14 to 0.3.1: `load_environment` gives an object with data sets, rollouts and a rubric."""

import asyncio
import json
import logging
import math
import os
import time
from types import ModuleType

from prl_worker import loading
from prl_worker.adapters.base import Environment, Info, LoadRequest, Outcome, SplitInfo, new_sample, put_messages
from prl_worker.adapters.legacy_client import BridgeClient, library, messages_from_wire, messages_to_wire, tools_to_wire
from prl_worker.catalogue import FINGERPRINT_ROWS, fingerprint, page, task_entry
from prl_worker.errors import ConfigError, WorkerError, describe
from prl_worker.framing import jsonable
from prl_worker.logs import reward_errors
from prl_worker.model_calls import ModelCalls, Run

log = logging.getLogger("prl_worker.legacy")

MAX_HELD = 8192


def _walk_rubrics(rubric) -> list:
    found = [rubric]
    for inner in getattr(rubric, "rubrics", None) or ():
        found += _walk_rubrics(inner)
    return found


class LegacyEnvironment(Environment):
    def __init__(self, request: LoadRequest, module: ModuleType) -> None:
        loading.check_arguments(request.env_id, module.load_environment, request.env_args)
        if request.env_config:
            raise ConfigError(f"environment {request.env_id!r} is of the legacy API, which has no env_config; its arguments are env_args")
        self._calls: ModelCalls = request.calls
        self._warnings: list[str] = []
        if request.judge == "call_back":
            # The library's judges make a client when they are built, which wants a key that is never used.
            os.environ.setdefault("OPENAI_API_KEY", "none")
        self._env = module.load_environment(**request.env_args)
        if asyncio.iscoroutine(self._env):
            self._env = asyncio.get_event_loop().run_until_complete(self._env)
        if not hasattr(self._env, "rollout") or not hasattr(self._env, "rubric"):
            raise ConfigError(f"load_environment of {request.env_id!r} gave a {type(self._env).__name__}, wanted an Environment of verifiers")
        self._env.env_id = getattr(self._env, "env_id", "") or request.env_id
        _free_loggers()
        self._set_extra(request.extra_env_kwargs)
        self._set_limits(request.limits)
        if request.judge == "call_back":
            self._bridge_judges()
        self._weights = self._reward_weights()
        self._rows = {split: self._dataset(split, request.limits.get(f"num_{split}")) for split in ("train", "eval")}
        self._is_plain: dict[str, bool] = {}
        if request.state is not None and hasattr(self._env, "load_state_dict"):
            self._env.load_state_dict(request.state)
        self._held: dict[str, tuple[str | None, object]] = {}
        self._info = self._describe()

    # Loading

    def _set_extra(self, extra: dict) -> None:
        unknown = [name for name in extra if not hasattr(self._env, name) and not callable(getattr(self._env, f"set_{name}", None))]
        if unknown:
            raise ConfigError(f"extra_env_kwargs: {type(self._env).__name__} has no {', '.join(unknown)}")
        for name, value in extra.items():
            setter = getattr(self._env, f"set_{name}", None)
            if callable(setter):
                setter(value)
            else:
                setattr(self._env, name, value)

    def _set_limits(self, limits: dict) -> None:
        if limits.get("max_seq_len") is not None:
            self._env.max_seq_len = limits["max_seq_len"]
        for name in ("max_turns", "max_total_completion_tokens"):
            value = limits.get(name)
            if value is None:
                continue
            setter = getattr(self._env, f"set_{name}", None)
            if callable(setter):
                setter(value)
            elif hasattr(self._env, name):
                setattr(self._env, name, value)
            else:
                self._warnings.append(f"{type(self._env).__name__} has no {name}; the limit of {value} is not kept by it")

    def _bridge_judges(self) -> None:
        from openai import AsyncOpenAI, OpenAI

        from prl_worker.adapters.openai_bridge import make_client

        bridged = None
        for rubric in _walk_rubrics(self._env.rubric):
            client = getattr(rubric, "judge_client", None)
            if isinstance(client, AsyncOpenAI):
                bridged = bridged or make_client(self._calls, "judge")
                rubric.judge_client = bridged
                for name, item in list(getattr(rubric, "class_objects", {}).items()):
                    if item is client:
                        rubric.class_objects[name] = bridged
            elif isinstance(client, OpenAI):
                self._warnings.append(f"{type(rubric).__name__} has a synchronous judge client, which cannot be called back; it needs network")

    def _reward_weights(self) -> dict[str, float]:
        weights: dict[str, float] = {}
        for rubric in _walk_rubrics(self._env.rubric):
            for function, weight in zip(getattr(rubric, "funcs", ()), getattr(rubric, "weights", ())):
                name = getattr(function, "__name__", repr(function))
                weights[name] = weights.get(name, 0.0) + float(weight)
        return weights

    def _dataset(self, split: str, limit: int | None):
        """The rows, or None where there is no such split."""
        env = self._env
        has_train = env.dataset is not None or getattr(env, "dataset_source", None) is not None
        has_eval = env.eval_dataset is not None or getattr(env, "eval_dataset_source", None) is not None
        if split == "train":
            if not has_train:
                return None
            rows = env.get_dataset()
        else:
            rows = env.get_eval_dataset() if has_eval else env.get_dataset()
        if limit is not None and 0 <= limit < len(rows):
            rows = rows.select(range(limit))
        return rows

    def _describe(self) -> Info:
        env = self._env
        splits = {}
        for split, rows in self._rows.items():
            if rows is None:
                continue
            first = [jsonable(row) for row in rows.select(range(min(len(rows), FINGERPRINT_ROWS)))]
            same = split == "eval" and env.eval_dataset is None and getattr(env, "eval_dataset_source", None) is None
            splits[split] = SplitInfo(num_tasks=len(rows), infinite=False, fingerprint=fingerprint(len(rows), first), same_as_train=same)
            self._is_plain[split] = all(row == cleaned for row, cleaned in zip(rows.select(range(len(first))), first))
        return Info(
            kind="legacy",
            splits=splits,
            group_scoring=bool(env.requires_group_rollouts),
            provides_advantages=bool(getattr(env, "provides_advantages", False)),
            tools=tools_to_wire(getattr(env, "tool_defs", None) or []),
            reward_names=[name for name, weight in self._weights.items() if weight],
            metric_names=[name for name, weight in self._weights.items() if not weight],
            system_prompt=env.system_prompt if isinstance(getattr(env, "system_prompt", None), str) else None,
            is_stateful=hasattr(env, "state_dict"),
            warnings=self._warnings,
        )

    def info(self) -> Info:
        return self._info

    # Tasks

    def tasks(self, split: str, offset: int, limit: int, with_data: bool) -> tuple[list[dict], bool]:
        rows = self._rows[split]
        end = min(offset + limit, len(rows))
        entries = page((self._entry(rows, index, with_data) for index in range(offset, end)), limit)
        return entries, offset + len(entries) >= len(rows)

    @staticmethod
    def _entry(rows, index: int, with_data: bool) -> dict:
        row = rows[index]
        info = row.get("info")
        if isinstance(info, str):
            try:
                info = json.loads(info)
            except ValueError:
                info = {"info": info}
        answer = row.get("answer")
        example = row.get("example_id", index)
        return task_entry(
            index,
            row,
            task_id=str(example),
            prompt=messages_to_wire(row.get("prompt")),
            answer=None if answer is None else str(answer),
            info=info if isinstance(info, dict) else None,
            with_data=with_data,
        )

    def _input(self, run: Run) -> dict:
        rows = self._rows.get(run.split)
        # A row with values that are no JSON (images, dates) did not survive the way there and back.
        if run.data is not None and self._is_plain.get(run.split, True):
            return dict(run.data)
        if rows is None or not 0 <= run.index < len(rows):
            raise WorkerError("bug", f"no row {run.index} in the split {run.split!r}", retryable=False)
        return dict(rows[run.index])

    # Rollouts

    async def run(self, run: Run) -> Outcome:
        row = self._input(run)
        row.setdefault("example_id", run.index)
        client = BridgeClient(self._calls, run)
        sampling = self._merged_sampling(run)
        if self._info.group_scoring and not run.hold:
            raise ConfigError("this environment's rubric scores groups: the rollout must hold")
        if run.hold:
            state = await self._env.rollout(row, client, run.model, sampling)
            self._keep(run, state)
        else:
            # With scoring and cleanup, as the library itself runs a rollout.
            state = await self._env._run_rollout_state(row, client, run.model, sampling)
        sample = self._sample(run, state)
        if not run.hold:
            self._take_scores(sample, state, run.reward_errors)
        record = await self._record(state) if run.want_record else None
        return Outcome(samples=[sample], is_held=run.hold, record=record)

    def _merged_sampling(self, run: Run) -> dict:
        """The environment's own arguments, which rollouts alone ignore, below those of the run."""
        own = dict(getattr(self._env, "sampling_args", None) or {})
        extra = {**(own.pop("extra_body", None) or {})}
        own.pop("n", None)
        merged = {key: value for key, value in own.items() if value is not None}
        merged.update(run.sampling)
        if extra:
            merged["extra_body"] = {key: value for key, value in extra.items() if key not in merged}
        return merged

    def _sample(self, run: Run, state) -> dict:
        sample = new_sample(run, session_id=run.session_id)
        self._fill(sample, run, state, _timing(state.get("timing"), run))
        if state.get("error") is not None:
            sample.update(ok=False, error=describe(state["error"], default="task"))
        return sample

    @staticmethod
    def _fill(sample: dict, run: Run, state, timing: dict) -> None:
        """All that `state`, the library's or what a server tells of it, says but for errors and scores."""
        # The library takes a rollout that ran out of its own time for a finished one; without a turn there is nothing of it.
        is_empty_timeout = bool(state.get("timed_out")) and not sample["calls"]
        answer = state.get("answer")
        sample.update(
            is_truncated=bool(state.get("is_truncated")),
            stop_condition=state.get("stop_condition"),
            ok=not is_empty_timeout,
            timing=timing,
            answer=None if answer is None else str(answer),
            info=jsonable(state.get("info") or {}),
            columns={name: jsonable(state.get(name)) for name in run.columns},
        )
        if is_empty_timeout:
            sample["error"] = {"type": "TimeoutError", "message": "the environment's own time limit", "class": "timeout", "retryable": True}
        if run.want_messages:
            tools = tools_to_wire(state.get("tool_defs") or [])
            put_messages(sample, run, messages_to_wire(state.get("prompt")), messages_to_wire(state.get("completion")), tools)

    def _take_scores(self, sample: dict, state, failures: list[str]) -> None:
        reward = state.get("reward")
        metrics = dict(state.get("metrics") or {})
        _check_finite(reward, metrics, self._weights)
        sample["reward"] = None if reward is None else float(reward)
        sample["metrics"] = {name: _finite(value) for name, value in metrics.items()}
        sample["rewards"] = self._parts(sample["reward"], sample["metrics"])
        sample["warnings"] = list(failures)
        if self._info.provides_advantages and state.get("advantage") is not None:
            sample["advantage"] = float(state["advantage"])

    def _parts(self, reward: float | None, metrics: dict) -> dict:
        """The weighted parts, if they make up the reward: a rubric may add it up in its own way."""
        if reward is None:
            return {}
        parts = {
            name: {"score": metrics[name], "weight": weight}
            for name, weight in self._weights.items()
            if weight and metrics.get(name) is not None
        }
        total = sum(part["score"] * part["weight"] for part in parts.values())
        if abs(total - reward) <= 1e-6 * max(1.0, abs(reward)):
            return parts
        return {"reward": {"score": reward, "weight": 1.0}}

    @staticmethod
    async def _record(state):
        return jsonable(await asyncio.to_thread(library("utils.save_utils").state_to_output, state, []))

    # Groups

    def _keep(self, run: Run, state) -> None:
        self._held[run.run_id] = (run.group_id, state)
        while len(self._held) > MAX_HELD:
            oldest = next(iter(self._held))
            log.warning("%d rollouts are held; %s is forgotten", len(self._held), oldest)
            del self._held[oldest]

    async def score_group(self, members: list[dict]) -> list[dict | None]:
        states, run_ids = [], []
        for member in members:
            if member.get("failed"):
                continue
            held = self._held.get(member["run_id"])
            if held is not None:
                states.append(held[1])
            elif isinstance(member.get("sample"), dict):
                states.append(self._rebuild(member["sample"]))
            else:
                raise WorkerError("infra", f"rollout {member['run_id']} is not held here and came without its sample")
            run_ids.append(member["run_id"])
        scored = await self._score(states, run_ids) if states else {}
        return [scored.get(member["run_id"]) for member in members]

    async def _score(self, states: list, run_ids: list[str]) -> dict[str, dict]:
        failures: list[str] = []
        reward_errors.set(failures)
        started = time.time()
        for state in states:
            _set_span(state, "start", started)
        await self._env.rubric.score_group(states)
        for state in states:
            _set_span(state, "end", time.time())
            await self._env.rubric.cleanup(state)
        scored = {}
        for run_id, state in zip(run_ids, states):
            entry: dict = {"run_id": run_id}
            self._take_scores(entry, state, failures)
            scored[run_id] = entry
        return scored

    def _rebuild(self, sample: dict):
        """A state as far as a sample tells it: for rubrics that look at messages, answers and info."""
        types = library("types")
        normalize = library("utils.message_utils").normalize_messages
        prompt = normalize(messages_from_wire(sample.get("prompt") or []), field_name="prompt")
        completion = normalize(messages_from_wire(sample.get("completion") or []), field_name="completion")
        row = {"prompt": prompt, "answer": sample.get("answer") or "", "info": sample.get("info") or {}, "example_id": 0}
        state = types.State(input=row)
        state["task"] = dict(row)
        state["completion"] = completion
        state["trajectory"] = [
            {"prompt": [*prompt, *completion[:place]], "completion": [message], "tokens": None, "response": None, "reward": None, "advantage": None}
            for place, message in enumerate(completion)
            if message.role == "assistant"
        ]
        state["is_completed"] = True
        state["is_truncated"] = bool(sample.get("is_truncated"))
        state["error"] = None
        state["timing"] = types.RolloutTiming()
        state["metrics"] = None
        state["reward"] = None
        for name, value in (sample.get("columns") or {}).items():
            state.setdefault(name, value)
        return state

    def release(self, run_ids: list[str] | None, group_id: str | None) -> None:
        for run_id in run_ids or ():
            self._held.pop(run_id, None)
        if group_id is not None:
            for run_id in [key for key, (group, _) in self._held.items() if group == group_id]:
                del self._held[run_id]

    @property
    def num_held(self) -> int:
        return len(self._held)

    def state(self) -> dict | None:
        return jsonable(self._env.state_dict()) if self._info.is_stateful else None

    async def close(self) -> None:
        await self._env._teardown()


def _free_loggers() -> None:
    """The library gives its loggers handlers of their own; ours is at the root."""
    for name, logger in list(logging.Logger.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and (name == "verifiers" or name.startswith("verifiers.")):
            logger.handlers[:] = []
            logger.propagate = True


def _finite(value) -> float | None:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def _check_finite(reward, metrics: dict, weights: dict[str, float]) -> None:
    if reward is None or math.isfinite(reward):
        return
    guilty = [f"{name} = {value}" for name, value in metrics.items() if weights.get(name) and not math.isfinite(float(value))]
    raise WorkerError("task", f"the reward is {reward}" + (f": {', '.join(guilty)}" if guilty else ""), retryable=False)


def _set_span(state, side: str, when: float) -> None:
    span = getattr(state.get("timing"), "scoring", None)
    if span is not None and hasattr(span, side):
        setattr(span, side, when)


def _timing(timing, run: Run) -> dict:
    def duration(name: str) -> float:
        value = getattr(timing, name, None)
        return round(float(getattr(value, "duration", value) or 0.0), 6) if value is not None else 0.0

    if timing is None:
        return {"model_s": run.model_seconds.get(run.session_id, 0.0)}
    return {
        "start": float(getattr(timing, "start_time", 0.0) or 0.0),
        "setup_s": duration("setup"),
        "generation_s": duration("generation"),
        "model_s": round(run.model_seconds.get(run.session_id, 0.0), 6),
        "env_s": duration("env"),
        "scoring_s": duration("scoring"),
        "total_s": duration("total"),
    }
