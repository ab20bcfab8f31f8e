"""The worker: what each message of the protocol does."""

import asyncio
import hmac
import inspect
import logging
import os
import platform
import threading
import time
from dataclasses import fields

from prl_worker import PROTOCOL, __version__, adapters, functions, health, loading, logs
from prl_worker.adapters.base import Environment, LoadRequest, Outcome, shortened
from prl_worker.connection import Connection
from prl_worker.errors import ConfigError, WorkerError, describe
from prl_worker.framing import DEFAULT_MAX_FRAME, MIN_MAX_FRAME, FrameTooLarge
from prl_worker.model_calls import ModelCalls, Run, current_run
from prl_worker.pump import Pump

log = logging.getLogger("prl_worker")

# Periods of grace, times the worker's patience.
CLEANUP_S = 5.0  # what a rollout gets after it was told to end
TEARDOWN_S = 10.0
HOLD_PER_RUN_S = 20e-6  # what a frame of a rollout may wait for others, for each rollout that is played: little beside what they wait for the loop
MAX_HOLD_S = 0.02
CAPABILITIES = ["cancel", "group", "hold", "multi_agent", "state", "call"]
_NEEDED = {
    "load": (("id", str), ("env_key", str), ("env_id", str)),
    "tasks": (("id", str), ("env_key", str), ("split", str), ("offset", int), ("limit", int)),
    "run": (("run_id", str), ("env_key", str), ("session_id", str), ("task", dict)),
    "cancel": (("run_id", str),),
    "model_reply": (("call_id", str),),
    "score_group": (("id", str), ("env_key", str), ("members", list)),
    "release": (("env_key", str),),
    "state": (("id", str), ("env_key", str)),
    "call": (("id", str), ("function", str)),
    "ping": (("id", str),),
    "unload": (("id", str), ("env_key", str)),
    "shutdown": (),
}


class BadRequest(Exception):
    """A message without a field or with one of another type."""


def _field(message: dict, name: str, kind, default=None):
    value = message.get(name)
    if value is None:
        return default
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadRequest(f"{message['t']}.{name} is {type(value).__name__}, wanted {kind.__name__}")
    return value


class Worker:
    """Serves one connection. `done` is set when it is over."""

    def __init__(self, token: str | None = None, protocol: int = PROTOCOL, patience: float = 1.0) -> None:
        self._token = token
        self._patience = patience
        self._protocol = protocol
        self.connection = Connection(self._on_message, self._on_bad_frame, self._on_lost)
        self.done = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._calls = ModelCalls(self._send)
        self._pump = Pump()
        self._environments: dict[str, Environment] = {}
        self._loading: set[str] = set()
        self._runs: dict[str, Run] = {}
        self._background: set[asyncio.Task] = set()
        self._counts = {"done": 0, "failed": 0, "cancelled": 0}
        self._has_hello = False
        self._is_closing = False
        self._max_inflight = 1024
        self._seed = 0
        self._health: health.Health | None = None
        self._load_lock = asyncio.Lock()

    def watch(self, fd: int) -> None:
        self._health = health.Health(fd, self._patience)
        self._health.start()

    # Messages out

    def _send(self, message: dict) -> None:
        self.connection.send(message)

    def _send_log(self, frame: dict) -> None:
        if threading.current_thread() is threading.main_thread():
            self._send(frame)
        else:
            self._loop.call_soon_threadsafe(self._send, frame)

    def _fatal(self, code: str, message: str) -> None:
        self._send({"t": "error", "code": code, "message": message, "fatal": True})
        self._spawn(self._close(f"{code}: {message}"))

    def _spawn(self, coroutine) -> asyncio.Task:
        task = self._loop.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    # Messages in

    def _on_bad_frame(self, error: Exception) -> None:
        self._fatal("bad_frame", str(error))

    def _on_lost(self) -> None:
        if not self._is_closing:
            self._spawn(self._close(None))

    def _on_message(self, message: dict) -> None:
        kind = message["t"]
        if self._is_closing and kind not in ("ping", "model_reply", "cancel"):
            return
        if not self._has_hello:
            if kind == "hello":
                self._on_hello(message)
            else:
                self._fatal("protocol", f"{kind} before hello")
            return
        needed = _NEEDED.get(kind)
        if needed is None:
            self._send({"t": "error", "code": "unknown_type", "message": f"unknown type {kind!r}", "fatal": False})
            return
        try:
            for name, wanted in needed:
                if message.get(name) is None:
                    raise BadRequest(f"{kind}.{name} is missing")
                _field(message, name, wanted)
            getattr(self, "_on_" + kind)(message)
        except BadRequest as error:
            reply = {"t": "error", "code": "bad_request", "message": str(error), "fatal": False}
            reply.update({key: message[key] for key in ("id", "run_id") if isinstance(message.get(key), str)})
            self._send(reply)

    def _on_hello(self, message: dict) -> None:
        asked = message.get("protocol")
        if asked != self._protocol:
            self._fatal("protocol", f"this worker speaks prl-env/{self._protocol}, asked for {asked!r}")
            return
        if self._token is not None and not hmac.compare_digest(self._token.encode(), str(message.get("token") or "").encode()):
            self._fatal("token", "hello.token is not that of PRL_ENV_TOKEN")
            return
        try:
            self._max_inflight = min(max(_field(message, "max_inflight", int, 1024), 1), 65536)
            max_frame = max(_field(message, "max_frame", int, DEFAULT_MAX_FRAME), MIN_MAX_FRAME)
            self._seed = _field(message, "seed", int, 0)
            level = _field(message, "log_level", str, "info")
        except BadRequest as error:
            self._fatal("bad_request", str(error))
            return
        self.connection.set_max_frame(max_frame)
        self._has_hello = True
        logs.install(self._send_log, level)
        loading.seed_everything(self._seed)
        reply = {
            "t": "hello_ok",
            "protocol": self._protocol,
            "worker_version": __version__,
            "pid": os.getpid(),
            "python": platform.python_version(),
            "packages": loading.packages(),
            "adapters": adapters.available(),
            "capabilities": CAPABILITIES,
            "max_frame": max_frame,
        }
        if self._token is not None:
            reply["token"] = self._token
        self._send(reply)

    def _on_ping(self, message: dict) -> None:
        self._send(
            {
                "t": "pong",
                "id": message["id"],
                "ts": message.get("ts"),
                "inflight": len(self._runs),
                "held": sum(environment.num_held for environment in self._environments.values()),
                "calls_open": len(self._calls),
                **self._counts,
                "loop_lag_ms": self._health.take_lag_ms() if self._health is not None else 0.0,
                "rss_mb": health.rss_mb(),
                "pss_mb": health.pss_mb(),
                "cpu_s": round(time.process_time(), 3),
                "open_files": health.open_files(),
                "threads": threading.active_count(),
            }
        )

    # Environments

    def _environment(self, message: dict) -> Environment:
        environment = self._environments.get(message["env_key"])
        if environment is None:
            raise WorkerError("infra", f"no environment {message['env_key']!r} is loaded here", retryable=False)
        return environment

    def _answer(self, message: dict, coroutine) -> None:
        """Sends what `coroutine` gives as the reply to `message`, or `failed`."""

        async def serve() -> None:
            try:
                reply = await coroutine
                self._send({**reply, "id": message["id"]})
            except FrameTooLarge as error:
                self._send({"t": "failed", "id": message["id"], "error": describe(WorkerError("task", f"the answer to {message['t']}: {error}"))})
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                self._send({"t": "failed", "id": message["id"], "error": describe(error)})

        self._spawn(serve())

    def _on_load(self, message: dict) -> None:
        request = LoadRequest(
            env_key=message["env_key"],
            kind=_field(message, "kind", str, "auto"),
            env_id=message["env_id"],
            paths=_field(message, "paths", list, []),
            env_args=_field(message, "env_args", dict, {}),
            env_config=_field(message, "env_config", dict, {}),
            limits=_field(message, "limits", dict, {}),
            judge=_field(message, "judge", str, "call_back"),
            seed=_field(message, "seed", int, self._seed),
            state=_field(message, "state", dict),
            calls=self._calls,
            connection=self.connection,
            extra_env_kwargs=_field(message, "extra_env_kwargs", dict, {}),
            relay=_field(message, "relay", str, ""),
        )
        self._answer(message, self._load(request))

    async def _load(self, request: LoadRequest) -> dict:
        if request.env_key in self._environments or request.env_key in self._loading:
            raise ConfigError(f"an environment {request.env_key!r} is loaded already")
        if request.judge not in ("call_back", "own"):
            raise ConfigError(f"judge is {request.judge!r}, wanted 'call_back' or 'own'")
        self._loading.add(request.env_key)
        started = time.monotonic()
        try:
            async with self._load_lock:
                loading.seed_everything(request.seed)
                with loading.without_collector():
                    environment = await _in_thread(lambda: adapters.build(request))
                await environment.open()
                info = environment.info()
        finally:
            self._loading.discard(request.env_key)
        self._environments[request.env_key] = environment
        reply = {item.name: getattr(info, item.name) for item in fields(info)}
        reply["splits"] = {name: split.to_json() for name, split in info.splits.items()}
        return {
            "t": "loaded",
            "env_key": request.env_key,
            "env_id": request.env_id,
            "env_version": _version_of(request.env_id),
            **reply,
            "load_s": round(time.monotonic() - started, 3),
        }

    def _on_tasks(self, message: dict) -> None:
        self._answer(message, self._tasks(message))

    async def _tasks(self, message: dict) -> dict:
        environment = self._environment(message)
        split, offset, limit = message["split"], message["offset"], message["limit"]
        if offset < 0 or not 1 <= limit <= 100_000:
            raise WorkerError("bug", f"tasks: offset {offset} and limit {limit} are out of range", retryable=False)
        if split not in environment.info().splits:
            raise ConfigError(f"environment {message['env_key']!r} has no split {split!r}")
        entries, is_end = environment.tasks(split, offset, limit, message.get("with_data") is not False)
        return {
            "t": "task_page",
            "env_key": message["env_key"],
            "split": split,
            "offset": offset,
            "next_offset": offset + len(entries),
            "end": is_end,
            "tasks": entries,
        }

    def _on_unload(self, message: dict) -> None:
        self._answer(message, self._unload(message))

    async def _unload(self, message: dict) -> dict:
        environment = self._environment(message)
        del self._environments[message["env_key"]]
        waiting = []
        for run in list(self._runs.values()):
            if run.env_key == message["env_key"]:
                self._stop(run, "cancel", "the environment was unloaded")
                waiting.append(run)
        waiting = [run.task for run in waiting if run.task is not None]
        if waiting:
            await asyncio.wait(waiting, timeout=CLEANUP_S * self._patience)
        await asyncio.wait_for(environment.close(), TEARDOWN_S * self._patience)
        return {"t": "unloaded", "env_key": message["env_key"]}

    def _on_state(self, message: dict) -> None:
        self._answer(message, self._state(message))

    async def _state(self, message: dict) -> dict:
        environment = self._environment(message)
        prints = {name: split.fingerprint for name, split in environment.info().splits.items()}
        return {"t": "state", "env_key": message["env_key"], "state": environment.state(), "fingerprints": prints}

    def _on_score_group(self, message: dict) -> None:
        self._answer(message, self._score_group(message))

    async def _score_group(self, message: dict) -> dict:
        environment = self._environment(message)
        members = message["members"]
        for member in members:
            if not isinstance(member, dict) or not isinstance(member.get("run_id"), str):
                raise WorkerError("bug", "score_group.members wants {run_id, ...}", retryable=False)
        try:
            samples = await environment.score_group(members)
        finally:
            environment.release([member["run_id"] for member in members], None)
        return {"t": "group_scored", "env_key": message["env_key"], "group_id": message.get("group_id"), "samples": samples}

    def _on_release(self, message: dict) -> None:
        environment = self._environments.get(message["env_key"])
        if environment is not None:
            environment.release(_field(message, "run_ids", list), _field(message, "group_id", str))

    # Functions

    def _on_call(self, message: dict) -> None:
        self._answer(message, self._call(message))

    async def _call(self, message: dict) -> dict:
        args, kwargs = message.get("args") or [], message.get("kwargs") or {}
        deadline = message.get("deadline_s")
        loading.add_paths(message.get("paths") or [])
        function = await _in_thread(lambda: _resolve(message["function"]))

        async def run():
            if inspect.iscoroutinefunction(function):
                return await function(*args, **kwargs)
            return await _in_thread(lambda: function(*args, **kwargs))

        try:
            value = await asyncio.wait_for(run(), deadline)
        except asyncio.TimeoutError:
            raise WorkerError("timeout", f"{message['function']} took over {deadline} s") from None
        return {"t": "returned", "value": value}

    # Rollouts

    def _on_run(self, message: dict) -> None:
        task = message["task"]
        want = _field(message, "want", dict, {})
        run = Run(
            run_id=message["run_id"],
            env_key=message["env_key"],
            split=_field(message, "split", str, "train"),
            mode=_field(message, "mode", str, "train"),
            index=task.get("index") if isinstance(task.get("index"), int) else 0,
            task_id=task.get("id") if isinstance(task.get("id"), str) else None,
            data=task.get("data") if isinstance(task.get("data"), dict) else None,
            session_id=message["session_id"],
            group_id=_field(message, "group_id", str),
            hold=_field(message, "hold", bool, False),
            model=_field(message, "model", str, "model"),
            sampling=_field(message, "sampling", dict, {}),
            limits=_field(message, "limits", dict, {}),
            deadline_s=_field(message, "deadline_s", float),
            columns=[str(column) for column in _field(message, "columns", list, [])],
            want_messages=want.get("messages") is not False,
            want_record=want.get("record") is True,
            want_brief=want.get("brief") is True,
        )
        if run.run_id in self._runs:
            raise BadRequest(f"run_id {run.run_id!r} is running already")
        if len(self._runs) >= self._max_inflight:
            self._finish(run, self._failure(run, WorkerError("infra", f"{len(self._runs)} rollouts are running, max_inflight is {self._max_inflight}")))
            return
        try:
            environment = self._environment(message)
        except WorkerError as error:
            self._finish(run, self._failure(run, error))
            return
        self._runs[run.run_id] = run
        self._hold()
        if run.deadline_s is not None:
            run.timers.append(self._loop.call_later(max(run.deadline_s, 0.0), self._stop, run, "timeout", ""))
        self._pump.add(self._start, environment, run)

    def _start(self, environment: Environment, run: Run) -> None:
        if not run.is_closed:
            run.task = self._spawn(self._play(environment, run))

    async def _play(self, environment: Environment, run: Run) -> None:
        run.has_begun = True
        current_run.set(run)
        logs.reward_errors.set(run.reward_errors)
        try:
            outcome = await environment.run(run)
            if run.stop_reason is not None:
                terminal = self._ended(run)
                environment.release([run.run_id], None)
            else:
                await self.connection.room()
                terminal = self._result(run, outcome)
        except asyncio.CancelledError as error:
            if run.stop_reason is None and not self._is_closing:
                terminal = self._failure(run, WorkerError("task", f"the environment cancelled its own rollout: {error}"))
            else:
                terminal = self._ended(run)
        except BaseException as error:
            terminal = self._failure(run, error) if run.stop_reason is None else self._ended(run)
        self._calls.drop(run)
        self._finish(run, terminal)

    def _result(self, run: Run, outcome: Outcome) -> dict:
        result = {"t": "result", "run_id": run.run_id, "samples": outcome.samples, "held": outcome.is_held}
        if run.want_brief:
            result["samples"] = [shortened(sample) for sample in outcome.samples]
        else:
            result["env_key"] = run.env_key
            result["group_id"] = run.group_id
            result["task"] = {"index": run.index, "id": run.task_id if run.task_id is not None else str(run.index)}
        if outcome.error is not None:
            result["error"] = outcome.error
        if run.want_record:
            result["record"] = outcome.record
        return result

    @staticmethod
    def _failure(run: Run, error: BaseException) -> dict:
        return {"t": "failed", "run_id": run.run_id, "error": describe(error)}

    def _ended(self, run: Run) -> dict:
        if run.stop_reason == "timeout":
            return self._failure(run, WorkerError("timeout", f"the rollout took over its deadline of {run.deadline_s} s"))
        return {"t": "cancelled", "run_id": run.run_id, "reason": run.cancel_reason}

    def _finish(self, run: Run, terminal: dict) -> None:
        """The one place that sends a terminal message, once for each run."""
        if run.is_closed:
            return
        run.is_closed = True
        for timer in run.timers:
            timer.cancel()
        self._runs.pop(run.run_id, None)
        self._hold()
        try:
            self._send(terminal)
        except FrameTooLarge as error:
            terminal = self._failure(run, WorkerError("task", f"the result of the rollout: {error}", retryable=False))
            self._send(terminal)
        except Exception as error:
            log.exception("the result of rollout %s cannot be sent", run.run_id)
            terminal = self._failure(run, WorkerError("bug", f"the result of the rollout: {type(error).__name__}", retryable=False))
            self._send(terminal)
        self._counts[{"result": "done", "failed": "failed", "cancelled": "cancelled"}[terminal["t"]]] += 1

    def _hold(self) -> None:
        self.connection.hold_s = min(HOLD_PER_RUN_S * len(self._runs), MAX_HOLD_S)

    def _on_cancel(self, message: dict) -> None:
        run = self._runs.get(message["run_id"])
        if run is not None:
            self._stop(run, "cancel", str(message.get("reason") or ""))

    def _stop(self, run: Run, why: str, reason: str) -> None:
        if run.stop_reason is not None or run.is_closed:
            return
        run.stop_reason, run.cancel_reason = why, reason
        if run.task is not None:
            self._calls.drop(run)
            run.task.cancel()
        if not run.has_begun:  # a task that is cancelled before its first step never runs, so nothing in it would end the rollout
            self._finish(run, self._ended(run))
            return
        run.timers.append(self._loop.call_later(CLEANUP_S * self._patience, self._abandon, run))

    def _abandon(self, run: Run) -> None:
        """The environment's code swallowed the cancellation: it goes on, but nobody hears of it."""
        if run.is_closed:
            return
        log.warning("rollout %s of %s does not end %g s after it was told to; it is left alone", run.run_id, run.env_key, CLEANUP_S * self._patience)
        run.task.cancel()
        self._calls.drop(run)
        self._finish(run, self._ended(run))

    def _on_model_reply(self, message: dict) -> None:
        self._pump.add(self._calls.on_reply, message, urgent=True)

    # The end

    def _on_shutdown(self, message: dict) -> None:
        self._spawn(self._shut_down(_field(message, "grace_s", float, 0.0)))

    async def _shut_down(self, grace_s: float) -> None:
        self._is_closing = True
        tasks = [run.task for run in self._runs.values() if run.task is not None]
        if tasks and grace_s > 0:
            await asyncio.wait(tasks, timeout=grace_s)
        await self._close("shutdown", force=True)

    async def _close(self, reason: str | None, force: bool = False) -> None:
        """`reason` None: the peer is gone."""
        if self._is_closing and not force:
            return
        self._is_closing = True
        runs = list(self._runs.values())
        for run in runs:
            self._stop(run, "cancel", "the worker shuts down")
        tasks = [run.task for run in runs if run.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CLEANUP_S * self._patience)
        self._calls.close()
        for key, environment in self._environments.items():
            try:
                await asyncio.wait_for(environment.close(), TEARDOWN_S * self._patience)
            except Exception as error:
                log.warning("closing environment %s: %s: %s", key, type(error).__name__, error)
        if reason is not None:
            self._send({"t": "bye", "reason": reason})
            await self.connection.close()
        if self._health is not None:
            self._health.stop()
        self.done.set()


def _version_of(env_id: str) -> str | None:
    name = env_id.rsplit("/", 1)[-1].split("@", 1)[0].split("==", 1)[0]
    return loading.installed(name)


def _resolve(path: str):
    module, _, name = path.partition(":")
    if not name:
        raise ConfigError(f"function {path!r}: wanted module:name")
    return functions.find(module, name)


async def _in_thread(work):
    """Runs `work` in a thread of its own that has an event loop, as environments expect that call asyncio while they are built."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def deliver(value, error) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(value)

    def run() -> None:
        own = asyncio.new_event_loop()
        asyncio.set_event_loop(own)
        value, error = None, None
        try:
            value = work()
        except StopIteration as caught:
            error = RuntimeError(f"StopIteration: {caught}")
        except BaseException as caught:
            error = caught
        finally:
            asyncio.set_event_loop(None)
            own.close()
        loop.call_soon_threadsafe(deliver, value, error)

    threading.Thread(target=run, name="prl-load", daemon=True).start()
    return await future
