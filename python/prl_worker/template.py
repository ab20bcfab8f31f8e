"""A process that has imported what workers need and forks them on request: `python -m prl_worker --template --fd N`.

The orchestrator asks over a control socket in the protocol's frames (docs/developers/env-protocol.md, "Templates"), and the sockets and pipes of the new
process come along as descriptors. One template imports the library of its interpreter; the template of an environment is forked from it and imports the
environment's module. Nothing may be alive at a fork but this one thread: an import that leaves threads, descriptors or processes behind is reported, and
the orchestrator forks from before it.
"""

import asyncio
import gc
import importlib
import json
import os
import socket
import sys
import tempfile
import threading
import time

from prl_worker import adapters, loading, process
from prl_worker.framing import HEADER, encode_frame
from prl_worker.randomness import Fresh

MAX_REQUEST = 1024 * 1024
THREAD_ENDS_S = 1.0  # from the end of a Python thread to that of the kernel's
# Names that environments of the legacy API take from the library, which imports what is behind them with the first use.
_LEGACY_NAMES = ("Environment", "SingleTurnEnv", "MultiTurnEnv", "ToolEnv", "Rubric", "JudgeRubric", "Parser", "XMLParser")


def _receive(control: socket.socket) -> tuple[dict, list[int]] | None:
    """A frame and the descriptors that came with it; None at the end."""
    data, descriptors, _, _ = socket.recv_fds(control, HEADER.size, 4, socket.MSG_WAITALL)
    if len(data) < HEADER.size:
        return None
    length, _ = HEADER.unpack(data)
    if length > MAX_REQUEST:
        raise SystemExit(f"prl_worker: a request of {length} bytes to a template")
    payload = control.recv(length, socket.MSG_WAITALL)
    if len(payload) < length:
        return None
    for fd in descriptors:
        os.set_inheritable(fd, False)
    return json.loads(payload), descriptors


def _send(control: socket.socket, message: dict) -> None:
    control.sendall(encode_frame(message, MAX_REQUEST))


def _import_library(kind: str) -> None:
    """The generation that the interpreter has, and this package's side of it."""
    if kind == "fake":
        importlib.import_module("prl_worker.adapters.fake")
    elif loading.has_legacy():
        verifiers = importlib.import_module("verifiers")
        importlib.import_module("prl_worker.adapters.legacy")
        importlib.import_module("prl_worker.adapters.openai_bridge")
        for name in _LEGACY_NAMES:
            getattr(verifiers, name, None)
    elif loading.has_v1():
        importlib.import_module("prl_worker.adapters.v1")
        importlib.import_module("verifiers.v1.tasksets")  # where its loader looks for every environment


def _import_module(request: dict) -> None:
    loading.add_paths(request.get("paths") or [])
    loading.import_module(request["env_id"])


def _in_thread(work) -> BaseException | None:
    """In a thread with an event loop, as a worker imports: loops, thread-local values and handlers of signals end with it."""
    caught: list[BaseException] = []

    def run() -> None:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        try:
            work()
        except BaseException as error:
            caught.append(error)
        finally:
            asyncio.set_event_loop(None)
            loop.close()

    thread = threading.Thread(target=run, name="prl-load", daemon=True)
    thread.start()
    thread.join()
    return caught[0] if caught else None


def _leftovers(known: dict[int, str]) -> str:
    """What the import left behind that two processes must not share; empty: nothing."""
    deadline = time.monotonic() + THREAD_ENDS_S
    while (names := process.threads()) and threading.active_count() == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    found = []
    if names:
        names = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()] or names
        found.append("threads (" + ", ".join(sorted(names)) + ")")
    opened = {target for fd, target in process.descriptors().items() if known.get(fd) != target}
    if opened:
        found.append("open descriptors (" + ", ".join(sorted(opened)) + ")")
    if children := process.children():
        found.append("processes (" + ", ".join(map(str, children)) + ")")
    return " and ".join(found)


class Template:
    def __init__(self, fd: int) -> None:
        self._control = socket.socket(fileno=fd)
        self._fresh = Fresh()
        gc.disable()  # in the template for good: a collector would touch, and so copy, what its children share

    def serve(self) -> int:
        """Returns in a worker that was forked, with the descriptor of its connection; the template itself ends with its control socket."""
        process.set_name("prl-template")
        process.heed_variables()
        while True:
            try:
                received = _receive(self._control)
            except OSError:
                received = None
            if received is None:
                os._exit(0)
            request, descriptors = received
            if request["t"] == "preload":
                _send(self._control, self._preload(request))
            elif request["t"] == "fork":
                connection = self._fork(request, descriptors)
                if connection is not None and request["role"] == "worker":
                    gc.enable()
                    return connection.detach()
                if connection is not None:
                    self._control = connection
            else:
                raise SystemExit(f"prl_worker: {request['t']!r} is no request to a template")

    def _preload(self, request: dict) -> dict:
        started, cpu = time.monotonic(), time.process_time()
        known = process.descriptors()
        # Python files of the library lie in a virtual environment; those of a module in a folder of its author.
        sys.dont_write_bytecode = not request.get("writes_bytecode")
        with self._fresh.noted():
            error = _in_thread(lambda: _import_library(request["kind"]) if request["what"] == "library" else _import_module(request))
        sys.dont_write_bytecode = True
        problem = ""
        if error is not None:
            problem = f"failed: {type(error).__name__}: {error}"
        elif left := _leftovers(known):
            problem = f"left {left} behind"
        gc.freeze()
        return {
            "t": "ready",
            "problem": problem[:2000],
            "is_failed": error is not None,
            "took_s": round(time.monotonic() - started, 3),
            "cpu_s": round(time.process_time() - cpu, 3),
        }

    def _fork(self, request: dict, descriptors: list[int]) -> socket.socket | None:
        """The child's connection in the child, None in the template, which has told the orchestrator."""
        reply = {"t": "forked", "id": request["id"]}
        report, report_end = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        try:
            pid = process.fork_sibling()
        except process.CannotFork as error:
            pid = -1
            reply["problem"] = str(error)
        if pid == 0:
            os.close(report)
            try:
                connection = self._become(request, descriptors)
                os.close(report_end)  # nothing in it: all went well
                return connection
            except BaseException as error:
                os.write(report_end, f"{type(error).__name__}: {error}".encode()[:2000])
                os._exit(127)
        os.close(report_end)
        if pid > 0:
            reply["pid"] = pid
            with open(report, "rb") as file:
                if problem := file.read():
                    reply["problem"] = problem.decode(errors="replace")
        else:
            os.close(report)
        for fd in descriptors:
            os.close(fd)
        _send(self._control, reply)
        return None

    def _become(self, request: dict, descriptors: list[int]) -> socket.socket:
        connection, output = descriptors
        process.set_name(f"prl-{request['role']}")
        os.setpgid(0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        self._control.close()
        os.chdir(request["folder"])
        os.environ["TMPDIR"] = request["folder"]
        tempfile.tempdir = None
        process.enter(request.get("limits") or {}, request.get("namespace"), request.get("counted_uid") or 0)
        process.die_with(request["parent"])
        self._fresh.renew()
        return socket.socket(fileno=connection)
