"""Work that arrives in bursts, handed to the loop a little at a time."""

import asyncio
from collections import deque
from collections.abc import Callable

PER_TURN = 4


class Pump:
    """A thousand replies in one read would wake a thousand rollouts in one turn of the loop, and a pong would wait for all of
    them. `add` queues a call instead; a turn of the loop gets PER_TURN of them. Replies go before starts: they end work.
    Loop's thread only."""

    def __init__(self) -> None:
        self._urgent: deque[tuple[Callable, tuple]] = deque()
        self._normal: deque[tuple[Callable, tuple]] = deque()
        self._task: asyncio.Task | None = None

    def add(self, call: Callable, *arguments, urgent: bool = False) -> None:
        (self._urgent if urgent else self._normal).append((call, arguments))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._urgent or self._normal:
                for _ in range(PER_TURN):
                    queue = self._urgent or self._normal
                    if not queue:
                        break
                    call, arguments = queue.popleft()
                    call(*arguments)
                await asyncio.sleep(0)
        finally:
            self._task = None
