"""Model calls: questions to the orchestrator over the connection, and its answers."""

import asyncio
import contextvars
from dataclasses import dataclass, field
from typing import Any

from prl_worker.errors import ModelCallError, WorkerError
from prl_worker.framing import FrameTooLarge

# The rollout that the running code belongs to: for calls that do not come with one, and for records of logging.
current_run: contextvars.ContextVar["Run | None"] = contextvars.ContextVar("prl_current_run", default=None)


@dataclass(eq=False)
class Run:
    """One rollout that was asked for, with what is known of it so far."""

    run_id: str
    env_key: str
    split: str
    mode: str
    index: int
    task_id: str | None
    data: dict | None
    session_id: str
    group_id: str | None
    hold: bool
    model: str
    sampling: dict
    limits: dict
    deadline_s: float | None
    columns: list[str]
    want_messages: bool
    want_record: bool
    want_brief: bool = False  # what the orchestrator knows is left out of model calls and the result
    task: asyncio.Task | None = None
    has_begun: bool = False  # the task's first step has run: only then can it end by itself when it is cancelled
    stop_reason: str | None = None  # "cancel" or "timeout" once it was told to end
    cancel_reason: str = ""
    is_closed: bool = False  # its terminal message has left
    timers: list[asyncio.TimerHandle] = field(default_factory=list)
    open_calls: set[str] = field(default_factory=set)
    turns: dict[tuple[str, str], int] = field(default_factory=dict)
    answered: dict[str, list[str]] = field(default_factory=dict)  # session to call ids with a reply, policy only
    model_seconds: dict[str, float] = field(default_factory=dict)  # by session
    said: dict[str, tuple[str, list[dict], dict]] = field(default_factory=dict)  # session to its last policy call: id, messages, reply
    usage: dict[str, list[int]] = field(default_factory=dict)  # session to [input, output, cached]
    reward_errors: list[str] = field(default_factory=list)


@dataclass
class Reply:
    """What the model said."""

    call_id: str
    message: dict
    finish_reason: str
    usage: dict
    model: str | None


def shorten(message: dict, known: set[str]) -> dict:
    """Without members that the orchestrator knows, and those that say nothing."""
    return {key: value for key, value in message.items() if key not in known and not (value is None or isinstance(value, (list, dict)) and not value)}


class ModelCalls:
    """Sends `model_call`, waits for `model_reply`. Loop's thread only."""

    def __init__(self, send) -> None:
        self._send = send
        self._next = 0
        self._waiting: dict[str, asyncio.Future] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    async def call(
        self,
        run: Run | None,
        *,
        messages: list[dict],
        tools: list[dict] | None = None,
        sampling: dict | None = None,
        purpose: str = "policy",
        session_id: str | None = None,
        seat: str = "agent",
        trainable: bool = True,
        model: str | None = None,
        tool_choice: Any = None,
    ) -> Reply:
        """Raises ModelCallError for what the orchestrator refuses, CancelledError when the rollout is over."""
        if run is not None and run.is_closed:
            raise asyncio.CancelledError(f"rollout {run.run_id} is over")
        loop = asyncio.get_running_loop()
        self._next += 1
        call_id = f"c{self._next}"
        session = session_id or (run.session_id if run is not None else "")
        turn = 0
        if run is not None:
            turn = run.turns.get((session, purpose), 0)
            run.turns[(session, purpose)] = turn + 1
        message = {
            "t": "model_call",
            "run_id": run.run_id if run is not None else None,
            "call_id": call_id,
            "session_id": session,
            "turn": turn,
            "purpose": purpose,
            "seat": seat,
            "trainable": bool(trainable and purpose == "policy"),
            "model": model or (run.model if run is not None else ""),
            "messages": messages,
            "tools": tools or [],
            "sampling": sampling or {},
        }
        if tool_choice is not None:
            message["tool_choice"] = tool_choice
        if run is not None and run.want_brief:
            message = {**shorten(message, {"turn", "seat", "trainable"}), "messages": messages}
        future = loop.create_future()
        started = loop.time()
        try:
            self._send(message)
        except FrameTooLarge as error:
            raise WorkerError("task", f"the conversation of a model call is too large: {error}", retryable=False) from None
        self._waiting[call_id] = future
        if run is not None:
            run.open_calls.add(call_id)
        try:
            reply: Reply = await future
        except asyncio.CancelledError:
            if self._waiting.pop(call_id, None) is not None:
                self._send({"t": "model_cancel", "call_id": call_id})
            raise
        finally:
            self._waiting.pop(call_id, None)
            if run is not None:
                run.open_calls.discard(call_id)
                run.model_seconds[session] = run.model_seconds.get(session, 0.0) + loop.time() - started
        if run is not None and purpose == "policy":
            self._account(run, session, reply)
            run.said[session] = (reply.call_id, messages, reply.message)
        return reply

    @staticmethod
    def _account(run: Run, session: str, reply: Reply) -> None:
        run.answered.setdefault(session, []).append(reply.call_id)
        used = run.usage.setdefault(session, [0, 0, 0])
        for place, key in enumerate(("prompt_tokens", "completion_tokens", "cached_tokens")):
            count = reply.usage.get(key)
            used[place] += count if isinstance(count, int) else 0

    def on_reply(self, message: dict) -> None:
        future = self._waiting.pop(message.get("call_id"), None)
        if future is None or future.done():
            return
        error = message.get("error")
        if isinstance(error, dict):
            status = error.get("status")
            future.set_exception(
                ModelCallError(
                    str(error.get("class") or "provider"),
                    str(error.get("message") or "the model call failed"),
                    status if isinstance(status, int) else None,
                )
            )
            return
        said = message.get("message")
        if not isinstance(said, dict):
            future.set_exception(ModelCallError("provider", "model_reply has neither a message nor an error"))
            return
        usage = message.get("usage")
        future.set_result(
            Reply(
                call_id=message["call_id"],
                message={**said, "role": "assistant"},
                finish_reason=str(message.get("finish_reason") or "stop"),
                usage=usage if isinstance(usage, dict) else {},
                model=message.get("model"),
            )
        )

    def drop(self, run: Run) -> None:
        """Gives up what `run` still waits for."""
        for call_id in list(run.open_calls):
            future = self._waiting.pop(call_id, None)
            if future is not None and not future.done():
                self._send({"t": "model_cancel", "call_id": call_id})
                future.cancel()
        run.open_calls.clear()

    def close(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.cancel()
        self._waiting.clear()
