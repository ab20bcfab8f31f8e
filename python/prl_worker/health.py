"""What a pong tells: lag of the loop, memory, files. And a thread that sees a blocked loop and a dead peer."""

import asyncio
import os
import select
import sys
import threading
import time
import traceback

TICK_S = 0.05
WATCH_S = 0.5
BLOCKED_S = 5.0
GRACE_AFTER_HANGUP_S = 3.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


def rss_mb() -> float:
    with open("/proc/self/statm") as file:
        return round(int(file.read().split()[1]) * _PAGE / 2**20, 1)


def pss_mb() -> float:
    """Memory, what is shared with other processes in parts: all processes together have the sum. A few milliseconds."""
    try:
        with open("/proc/self/smaps_rollup") as file:
            return round(next(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024, 1)
    except (OSError, StopIteration):
        return rss_mb()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


class Health:
    """`start()` in the loop's thread, which must be the main one. `fd` is the connection's socket; `patience` is a factor of what it waits."""

    def __init__(self, fd: int, patience: float = 1.0) -> None:
        self._patience = patience
        self._fd = fd
        self._main = threading.main_thread().ident
        self._last_tick = time.monotonic()
        self._lag = 0.0
        self._ticker: asyncio.Task | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="prl-watch", daemon=True)

    def start(self) -> None:
        self._ticker = asyncio.get_running_loop().create_task(self._tick())
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._ticker is not None:
            self._ticker.cancel()

    def take_lag_ms(self) -> float:
        """The longest lag since the last call."""
        lag, self._lag = max(self._lag, time.monotonic() - self._last_tick - TICK_S), 0.0
        return round(max(lag, 0.0) * 1000, 1)

    async def _tick(self) -> None:
        while True:
            self._last_tick = time.monotonic()
            await asyncio.sleep(TICK_S)
            self._lag = max(self._lag, time.monotonic() - self._last_tick - TICK_S)

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLRDHUP)
        hung_up_at = None
        was_blocked = False
        while not self._done.wait(WATCH_S * self._patience):
            now = time.monotonic()
            if hung_up_at is None:
                try:
                    gone = any(events & (select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))
                except OSError:
                    gone = True
                if gone:
                    hung_up_at = now
            elif now - hung_up_at > GRACE_AFTER_HANGUP_S * self._patience:
                # The loop had its time to see it; whatever blocks it has nobody to work for.
                os._exit(1)
            is_blocked = now - self._last_tick > BLOCKED_S * self._patience
            if is_blocked and not was_blocked:
                self._report_block(now - self._last_tick)
            was_blocked = is_blocked

    def _report_block(self, seconds: float) -> None:
        frame = sys._current_frames().get(self._main)
        stack = "".join(traceback.format_stack(frame)[-12:]) if frame is not None else ""
        sys.stderr.write(f"prl_worker: the event loop is blocked for {seconds:.1f} s by\n{stack}")
        sys.stderr.flush()
