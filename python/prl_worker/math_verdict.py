"""Verdicts of the package math-verify, as verifiers' MathRubric asks for them. They are made in processes of their own: sympy may take
long over an answer, and its time limit works in a main thread only."""

import asyncio
import contextlib
import importlib.util
import json
import math
import pathlib
import sys

from prl_worker.errors import ConfigError

MAX_CHARS = 50_000
HARD_LIMIT_S = 30.0  # besides the package's own limits, which some of sympy's loops do not hear


def _verdict(given: str, wanted: str, timeout_s: int) -> bool:
    from math_verify import parse, verify

    def read(answer: str):
        return parse(f"\\boxed{{{answer}}}", parsing_timeout=timeout_s)

    try:
        return bool(verify(read(wanted), read(given), timeout_seconds=timeout_s))
    except BaseException:  # the package's timeout is no Exception
        return False


def _answer_lines() -> None:
    """What a process of the pool does: one verdict per line of its input, until that ends."""
    out, sys.stdout = sys.stdout, sys.stderr  # what the packages print is no verdict
    for line in sys.stdin:
        out.write("1\n" if _verdict(*json.loads(line)) else "0\n")
        out.flush()


class _Pool:
    """Processes that are asked over pipes. Pools of the standard library have semaphores in /dev/shm, which outlive a worker that is killed."""

    def __init__(self, max_workers: int) -> None:
        self._free = asyncio.Semaphore(max_workers)
        self._idle: list[asyncio.subprocess.Process] = []

    async def ask(self, given: str, wanted: str, timeout_s: int, limit_s: float, wants_new: bool) -> bool | None:
        """Of a new process if `wants_new`. None: the process is gone. asyncio.TimeoutError after limit_s; the process is ended then."""
        async with self._free:
            process = self._idle.pop() if self._idle else await self._start()
            if wants_new:
                self._end(process)
                process = await self._start()
            is_free = False
            try:
                process.stdin.write(json.dumps([given, wanted, timeout_s]).encode() + b"\n")
                verdict = await asyncio.wait_for(process.stdout.readline(), limit_s)
                is_free = verdict != b""
                return verdict == b"1\n" if is_free else None
            finally:
                if is_free:
                    self._idle.append(process)
                else:
                    self._end(process)

    @staticmethod
    def _end(process: asyncio.subprocess.Process) -> None:
        if not process.stdout.at_eof():  # else it is gone already
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    @staticmethod
    async def _start() -> asyncio.subprocess.Process:
        root = pathlib.Path(__file__).resolve().parents[1]
        code = f"import sys; sys.path.insert(0, {str(root)!r}); from prl_worker.math_verdict import _answer_lines; _answer_lines()"
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=pipe, stdout=pipe)


_the_pool: _Pool | None = None


def _pool(max_workers: int) -> _Pool:
    global _the_pool
    if _the_pool is None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(f"verify = \"math-verify\" needs the package math-verify, which {sys.executable} does not have; install it there or name another interpreter in verify_python")
        _the_pool = _Pool(max_workers)
    return _the_pool


async def verify(given: str, wanted: str, timeout_s: float = 5.0, max_workers: int = 1) -> bool:
    """Whether `given` is `wanted`. What takes too long, or kills its process twice, is not."""
    if not given or len(given) > MAX_CHARS:
        return False
    limit = max(1, math.ceil(timeout_s))
    for wants_new in (False, True):  # an idle process may have been killed by others, short of memory for example
        try:
            verdict = await _pool(max_workers).ask(given, wanted, limit, 3 * limit + HARD_LIMIT_S, wants_new)
        except asyncio.TimeoutError:
            return False
        if verdict is not None:
            return verdict
    return False
