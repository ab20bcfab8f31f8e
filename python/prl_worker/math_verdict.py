"""Verdicts of the package math-verify, as verifiers' MathRubric asks for them. They are made in processes of their own: sympy may take
long over an answer, and its time limit works in a main thread only."""

import asyncio
import importlib.util
import math
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from prl_worker.errors import ConfigError

MAX_CHARS = 50_000
HARD_LIMIT_S = 30.0  # besides the package's own limits, which some of sympy's loops do not hear

_executor: ProcessPoolExecutor | None = None


def _verdict(given: str, wanted: str, timeout_s: int) -> bool:
    from math_verify import parse, verify

    def read(answer: str):
        return parse(f"\\boxed{{{answer}}}", parsing_timeout=timeout_s)

    try:
        return bool(verify(read(wanted), read(given), timeout_seconds=timeout_s))
    except BaseException:  # the package's timeout is no Exception
        return False


def _pool(max_workers: int) -> ProcessPoolExecutor:
    global _executor
    if _executor is None:
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(f"verify = \"math-verify\" needs the package math-verify, which {sys.executable} does not have; install it there or name another interpreter in verify_python")
        _executor = ProcessPoolExecutor(max_workers=max_workers, mp_context=multiprocessing.get_context("spawn"))
    return _executor


def _drop_pool() -> None:
    global _executor
    pool, _executor = _executor, None
    if pool is not None:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)


async def verify(given: str, wanted: str, timeout_s: float = 5.0, max_workers: int = 1) -> bool:
    """Whether `given` is `wanted`. What takes too long, or kills its process twice, is not."""
    if not given or len(given) > MAX_CHARS:
        return False
    limit = max(1, math.ceil(timeout_s))
    for _ in range(2):
        future = asyncio.get_running_loop().run_in_executor(_pool(max_workers), _verdict, given, wanted, limit)
        try:
            return await asyncio.wait_for(future, 3 * limit + HARD_LIMIT_S)
        except asyncio.TimeoutError:
            _drop_pool()
            return False
        except BrokenProcessPool:
            _drop_pool()
    return False
