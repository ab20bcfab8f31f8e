"""The one socket of a worker: messages in, messages out, in the thread of the event loop."""

import asyncio
from collections.abc import Callable

from prl_worker.framing import DEFAULT_MAX_FRAME, FrameError, FrameReader, encode_frame

# Above this many unsent bytes senders of results wait; model calls and replies to pings do not.
HIGH_WATER = 16 * 1024 * 1024


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
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def send_raw(self, data: bytes) -> None:
        """For the fake adapter, which breaks the protocol when told to."""
        if self._transport is not None:
            self._transport.write(data)

    async def room(self) -> None:
        """Returns when less than HIGH_WATER is unsent."""
        await self._writable.wait()

    async def close(self) -> None:
        """Sends what is left, at most 5 s."""
        if self._transport is None:
            return
        for _ in range(100):
            if self._transport.get_write_buffer_size() == 0:
                break
            await asyncio.sleep(0.05)
        self._transport.close()
