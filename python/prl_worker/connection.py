"""The one socket of a worker: messages in, messages out, in the thread of the event loop."""

import asyncio
from collections.abc import Callable

from prl_worker.framing import DEFAULT_MAX_FRAME, FrameError, FrameReader, encode_frame

# Above this many unsent bytes senders of results wait; model calls and replies to pings do not.
HIGH_WATER = 16 * 1024 * 1024
# Frames of rollouts leave together, so that who reads them is woken once for many: those that one turn of the loop makes, and where many rollouts are played
# those of some milliseconds (`hold_s`). Others leave at once, with all before them.
_TOGETHER = {"model_call", "result"}
MAX_TOGETHER = 64 * 1024


class Connection(asyncio.Protocol):
    """`on_message` gets each message, `on_bad_frame` what is none, `on_lost` the end; all in the loop's thread."""

    def __init__(
        self, on_message: Callable[[dict], None], on_bad_frame: Callable[[FrameError], None], on_lost: Callable[[], None]
    ) -> None:
        self._on_message = on_message
        self._on_bad_frame = on_bad_frame
        self._on_lost = on_lost
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._is_broken = False
        self._together: list[bytes] = []
        self._together_size = 0
        self._flushed_at = 0.0
        self.hold_s = 0.0  # least time between two writes of such frames
        self.max_frame = DEFAULT_MAX_FRAME

    def set_max_frame(self, size: int) -> None:
        self.max_frame = size
        self._reader.max_frame = size

    def connection_made(self, transport) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=HIGH_WATER)

    def connection_lost(self, error) -> None:
        self._writable.set()
        self._on_lost()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        if self._is_broken:
            return
        try:
            messages = self._reader.feed(data)
        except FrameError as error:
            self._is_broken = True
            self._on_bad_frame(error)
            return
        for message in messages:
            self._on_message(message)

    def send(self, message: dict) -> None:
        """Never waits. Raises FrameTooLarge; after the end it does nothing."""
        frame = encode_frame(message, self.max_frame)
        if self._transport is None or self._transport.is_closing():
            return
        self._together.append(frame)
        self._together_size += len(frame)
        if message["t"] not in _TOGETHER or self._together_size > MAX_TOGETHER:
            self._flush()
        elif len(self._together) == 1:
            loop = asyncio.get_running_loop()
            if self._flushed_at + self.hold_s <= loop.time():
                loop.call_soon(self._flush)
            else:
                loop.call_at(self._flushed_at + self.hold_s, self._flush)

    def _flush(self) -> None:
        if not self._together:
            return
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(self._together))
            self._flushed_at = asyncio.get_running_loop().time()
        self._together.clear()
        self._together_size = 0

    def send_raw(self, data: bytes) -> None:
        """For the fake adapter, which breaks the protocol when told to."""
        self._flush()
        if self._transport is not None:
            self._transport.write(data)

    async def room(self) -> None:
        """Returns when less than HIGH_WATER is unsent."""
        await self._writable.wait()

    async def close(self) -> None:
        """Sends what is left, at most 5 s."""
        if self._transport is None:
            return
        self._flush()
        for _ in range(100):
            if self._transport.get_write_buffer_size() == 0:
                break
            await asyncio.sleep(0.05)
        self._transport.close()
