"""Records of `logging` as frames of the protocol, and the reward functions that legacy environments only log."""

import contextvars
import logging
import sys

from prl_worker.model_calls import current_run

MAX_PER_SECOND = 200
MAX_MESSAGE = 8 * 1024
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
# Where the running code's failed reward functions are noted.
reward_errors: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("prl_reward_errors", default=None)
_REWARD_FAILED = ("Error calling reward function", "Error calling group reward function")


class FrameHandler(logging.Handler):
    """Gives records to `emit_frame(dict)`, which any thread may call. At most MAX_PER_SECOND of them."""

    def __init__(self, emit_frame) -> None:
        super().__init__()
        self._emit_frame = emit_frame
        self._second = 0
        self._count = 0
        self._dropped = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._emit(record)
        except Exception:  # a log line must not end a rollout
            pass

    def _emit(self, record: logging.LogRecord) -> None:
        run = current_run.get()
        message = record.getMessage()
        failures = reward_errors.get()
        if failures is not None and message.startswith(_REWARD_FAILED):
            failures.append(_with_cause(message)[:MAX_MESSAGE])
        second = int(record.created)
        if second != self._second:
            if self._dropped:
                self._emit_frame(
                    {"t": "log", "level": "warning", "logger": "prl_worker", "msg": f"{self._dropped} log records were dropped", "ts": record.created}
                )
            self._second, self._count, self._dropped = second, 0, 0
        self._count += 1
        if self._count > MAX_PER_SECOND:
            self._dropped += 1
            return
        if record.exc_info and record.exc_info[0] is not None:
            message += "\n" + logging.Formatter().formatException(record.exc_info)
        frame = {"t": "log", "level": record.levelname.lower(), "logger": record.name, "msg": message[:MAX_MESSAGE], "ts": record.created}
        if run is not None:
            frame["run_id"] = run.run_id
        self._emit_frame(frame)


def _with_cause(message: str) -> str:
    """The library logs inside its `except`, so the exception is still there."""
    error = sys.exc_info()[1]
    if error is None:
        return message
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f" at {place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else ""
    return f"{message} ({type(error).__name__}{where})"


def install(emit_frame, level: str) -> logging.Handler:
    """Makes the frame handler the only one of the root logger."""
    root = logging.getLogger()
    handler = FrameHandler(emit_frame)
    root.handlers[:] = [handler]
    root.setLevel(LEVELS.get(level, logging.INFO))
    for noisy in ("httpx", "httpcore", "asyncio", "openai", "urllib3", "filelock", "fsspec", "aiohttp.access", "verifiers.v1.rollout", "mcp"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)
    return handler
