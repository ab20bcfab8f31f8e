"""The orchestrator's side of the protocol, for tests and measurements: starts a worker and answers its model calls."""

import asyncio
import contextlib
import itertools
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import tempfile

PYTHON_DIR = pathlib.Path(__file__).resolve().parents[1]
ROOT = PYTHON_DIR.parent
HEADER = struct.Struct("<IB")
WAIT_S = float(os.environ.get("PRL_TEST_WAIT_S", "60"))


def say(content=None, *, tool_calls=None, finish_reason=None, reasoning=None):
    """The fields of a model_reply."""
    message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments)}}
            for i, (name, arguments) in enumerate(tool_calls)
        ]
    return {
        "message": message,
        "finish_reason": finish_reason or ("tool_calls" if tool_calls else "stop"),
        "usage": {"prompt_tokens": 10, "completion_tokens": 5},
    }


def fail(kind, message="no", status=None):
    return {"error": {"class": kind, "message": message, "status": status}}


class WorkerGone(Exception):
    pass


class Peer:
    """`model(call)` gives the fields of the reply, or None to leave the call open; it may be a coroutine function."""

    def __init__(self, python=sys.executable, *, model=None, arguments=(), env=None, hello=None):
        self.python = python
        self.model = model or (lambda call: say("?"))
        self.arguments = list(arguments)
        self.env = env or {}
        self.hello_fields = hello or {}
        self.calls = []
        self.cancelled_calls = []
        self.logs = []
        self.errors = []
        self.unexpected = []
        self.hello_ok = None
        self._ids = itertools.count(1)
        self._replies = {}
        self._terminals = {}
        self.num_terminals = {}
        self._tasks = set()
        self.call_arrived = asyncio.Event()

    # Process and socket

    async def __aenter__(self):
        await self.start()
        return self

    async def __aexit__(self, *_):
        await self.stop()

    def _environment(self):
        env = {key: value for key, value in os.environ.items() if not key.startswith(("PRL_", "PYTHON"))}
        env.update(PYTHONPATH=str(PYTHON_DIR), PYTHONHASHSEED="0", HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        env.update(self.env)
        return env

    async def start(self):
        ours, theirs = socket.socketpair()
        self.stderr = tempfile.TemporaryFile()
        with theirs:
            self.process = subprocess.Popen(
                [self.python, "-m", "prl_worker", "--fd", str(theirs.fileno()), *self.arguments],
                pass_fds=[theirs.fileno()],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self.stderr,
                start_new_session=True,
            )
        await self.attach(ours)

    async def attach(self, sock):
        self.reader, self.writer = await asyncio.open_connection(sock=sock)
        self._reading = asyncio.create_task(self._read())

    async def stop(self):
        if self.stderr.closed:
            return
        if self._reading.done() is False:
            self.send({"t": "shutdown"})
            try:
                await asyncio.wait_for(asyncio.shield(self._reading), 20)
            except (asyncio.TimeoutError, WorkerGone):
                pass
        self.writer.close()
        self._reading.cancel()
        for task in self._tasks:
            task.cancel()
        try:
            await asyncio.to_thread(self.process.wait, 20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(20)
            raise AssertionError("the worker did not end\n" + self.stderr_text())
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # what an environment has started and left
            self.process.stdout.close()
            self._stderr = self.stderr_text()
            self.stderr.close()

    def stderr_text(self):
        if self.stderr.closed:
            return self._stderr
        self.stderr.seek(0)
        return self.stderr.read().decode(errors="replace")

    async def exit_status(self):
        return await asyncio.to_thread(self.process.wait, WAIT_S)

    # Messages

    def send(self, message):
        payload = json.dumps(message).encode()
        self.writer.write(HEADER.pack(len(payload), ord("J")) + payload)

    async def _read(self):
        try:
            while True:
                length, codec = HEADER.unpack(await self.reader.readexactly(HEADER.size))
                if codec != ord("J") or length > 256 * 2**20:
                    raise WorkerGone(f"a frame with codec {codec} and {length} bytes")
                self._dispatch(json.loads(await self.reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            self._end(WorkerGone("the worker ended"))
        except (WorkerGone, ValueError) as error:
            self._end(error)

    def _end(self, error):
        for future in (*self._replies.values(), *self._terminals.values()):
            if not future.done():
                future.set_exception(error)
                future.exception()

    def _dispatch(self, message):
        kind = message["t"]
        if kind == "model_call":
            self.calls.append(message)
            self.call_arrived.set()
            self._answer(message)
        elif kind == "model_cancel":
            self.cancelled_calls.append(message["call_id"])
        elif kind in ("result", "failed", "cancelled") and "run_id" in message:
            run_id = message["run_id"]
            self.num_terminals[run_id] = self.num_terminals.get(run_id, 0) + 1
            future = self._terminals.get(run_id)
            if future is None:
                self.unexpected.append(message)
            elif not future.done():
                future.set_result(message)
        elif kind == "log":
            self.logs.append(message)
        elif kind == "hello_ok":
            self.hello_ok = message
            self._replies["hello"].set_result(message)
        elif kind == "error":
            self.errors.append(message)
            key = "hello" if self.hello_ok is None else message.get("id")
            if key in self._replies and not self._replies[key].done():
                self._replies[key].set_result(message)
        elif "id" in message and message["id"] in self._replies:
            self._replies[message["id"]].set_result(message)
        elif kind != "bye":
            self.unexpected.append(message)

    def _answer(self, call):
        answer = self.model(call)
        if asyncio.iscoroutine(answer):

            async def later():
                fields = await answer
                if fields is not None:
                    self.send({"t": "model_reply", "call_id": call["call_id"], **fields})

            task = asyncio.create_task(later())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif answer is not None:
            self.send({"t": "model_reply", "call_id": call["call_id"], **answer})

    async def request(self, what, /, *, wait_s=WAIT_S, **message):
        key = f"q{next(self._ids)}"
        future = self._replies[key] = asyncio.get_running_loop().create_future()
        self.send({"t": what, "id": key, **message})
        try:
            return await asyncio.wait_for(future, wait_s)
        finally:
            self._replies.pop(key, None)

    async def hello(self, **message):
        future = self._replies["hello"] = asyncio.get_running_loop().create_future()
        self.send({"t": "hello", "protocol": 1, "worker_name": "test", **self.hello_fields, **message})
        return await asyncio.wait_for(future, WAIT_S)

    async def load(self, env_id="fake", kind="fake", *, env_key="e", expect="loaded", **message):
        if self.hello_ok is None:
            await self.hello()
        reply = await self.request("load", env_key=env_key, env_id=env_id, kind=kind, **message)
        if reply["t"] != expect:
            raise AssertionError(f"load answered {json.dumps(reply, indent=1)}")
        return reply

    def start_run(self, run_id, *, env_key="e", index=0, split="train", data=None, **message):
        """Sends `run`; the future of its terminal message."""
        task = {"index": index}
        if data is not None:
            task["data"] = data
        future = self._terminals[run_id] = asyncio.get_running_loop().create_future()
        self.send({"t": "run", "run_id": run_id, "env_key": env_key, "split": split, "task": task, "session_id": f"s-{run_id}", "model": "policy", **message})
        return future

    async def run(self, run_id="r1", **message):
        return await asyncio.wait_for(self.start_run(run_id, **message), WAIT_S)

    async def result(self, run_id="r1", **message):
        terminal = await self.run(run_id, **message)
        if terminal["t"] != "result":
            raise AssertionError(json.dumps(terminal, indent=1) + "\n" + self.stderr_text())
        return terminal

    async def sample(self, run_id="r1", **message):
        samples = (await self.result(run_id, **message))["samples"]
        if len(samples) != 1:
            raise AssertionError(f"{len(samples)} samples")
        return samples[0]

    async def until(self, condition, what):
        """Waits for a condition of this object."""
        for _ in range(int(WAIT_S * 50)):
            if condition():
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"{what} did not happen within {WAIT_S} s\n{self.stderr_text()}")
