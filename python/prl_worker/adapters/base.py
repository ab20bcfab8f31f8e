"""What the worker asks of an adapter."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from prl_worker.model_calls import ModelCalls, Run, shorten


@dataclass
class LoadRequest:
    env_key: str
    kind: str
    env_id: str
    paths: list[str]
    env_args: dict
    env_config: dict
    limits: dict
    judge: str
    seed: int
    state: dict | None
    calls: ModelCalls
    connection: Any = None  # for the fake adapter alone
    relay: str = ""  # tcp://host:port of an environment server of the library that plays the rollouts
    extra_env_kwargs: dict = field(default_factory=dict)  # of the legacy API: set once the environment is made


@dataclass
class Outcome:
    """A finished rollout: the protocol's samples."""

    samples: list[dict]
    error: dict | None = None
    record: Any = None
    is_held: bool = False


@dataclass
class SplitInfo:
    num_tasks: int | None
    infinite: bool
    fingerprint: str
    same_as_train: bool = False

    def to_json(self) -> dict:
        return dict(self.__dict__)


@dataclass
class Info:
    """The parts of `loaded` that the adapter knows."""

    kind: str
    splits: dict[str, SplitInfo]
    group_scoring: bool = False
    provides_advantages: bool = False
    seats: list[dict] = field(default_factory=lambda: [{"name": "agent", "trainable": True}])
    tools: list[dict] = field(default_factory=list)
    reward_names: list[str] = field(default_factory=list)
    metric_names: list[str] = field(default_factory=list)
    system_prompt: str | None = None
    is_stateful: bool = False
    warnings: list[str] = field(default_factory=list)


class Environment(ABC):
    """Built in a thread; everything else is called in the loop's thread. Rollouts run at the same time."""

    async def open(self) -> None:
        """Once, before the first call of anything below."""

    @abstractmethod
    def info(self) -> Info: ...

    @abstractmethod
    def tasks(self, split: str, offset: int, limit: int, with_data: bool) -> tuple[list[dict], bool]:
        """Entries from `offset` on, at most `limit`, fewer where they are large; and whether none follows them."""

    @abstractmethod
    async def run(self, run: Run) -> Outcome: ...

    async def score_group(self, members: list[dict]) -> list[dict | None]:
        """Members as in the request. One entry each, None for failed ones."""
        raise NotImplementedError(f"environment {type(self).__name__} does not score groups")

    def release(self, run_ids: list[str] | None, group_id: str | None) -> None:
        """Forgets held rollouts."""

    @property
    def num_held(self) -> int:
        return 0

    def state(self) -> dict | None:
        return None

    async def close(self) -> None:
        """Once, at the end."""


_KNOWN_MEMBERS = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"}


def put_messages(sample: dict, run: Run, prompt: list[dict] | None, completion: list[dict] | None, tools: list[dict]) -> None:
    """Where the run wants it brief and the conversation is that of the session's last call and its reply, only how many of its messages are the prompt, and
    what came after the reply."""
    sample["tools"] = tools
    said = run.said.get(sample["session_id"]) if run.want_brief else None
    if said is not None and prompt and completion:
        call_id, messages, reply = said
        whole = prompt + completion
        known = len(messages) + 1
        is_known = sample["calls"][-1:] == [call_id] and len(prompt) < known and whole[: known - 1] == messages and whole[known - 1 : known] == [reply]
        if is_known and all(message.keys() <= _KNOWN_MEMBERS and None not in message.values() for message in whole[:known]):
            sample.update(prompt_size=len(prompt), completion=whole[known:])
            return
    sample.update(prompt=prompt, completion=completion)


def shortened(sample: dict) -> dict:
    """The sample of a brief result: without what the orchestrator counts and times itself."""
    timing = {key: value for key, value in sample["timing"].items() if key == "scoring_s"}
    return shorten({**sample, "timing": timing}, {"session_id", "usage", "num_turns"})


def new_sample(run: Run, *, session_id: str, seat: str = "agent", trainable: bool = True) -> dict:
    """A Sample with what the worker itself counted; the adapter fills in the rest."""
    used = run.usage.get(session_id, [0, 0, 0])
    calls = list(run.answered.get(session_id, ()))
    return {
        "session_id": session_id,
        "seat": seat,
        "trainable": trainable,
        "reward": None,
        "rewards": {},
        "metrics": {},
        "is_truncated": False,
        "stop_condition": None,
        "ok": True,
        "error": None,
        "warnings": [],
        "timing": {},
        "usage": {"input_tokens": used[0], "output_tokens": used[1], "cached_tokens": used[2]},
        "num_turns": len(calls),
        "calls": calls,
        "answer": None,
        "info": {},
        "columns": {},
    }
