"""Frames of the protocol: 4 bytes of length, 1 byte of codec, a JSON object."""

import codecs
import json
import math
import struct

HEADER = struct.Struct("<IB")
CODEC_JSON = ord("J")
DEFAULT_MAX_FRAME = 64 * 1024 * 1024
MIN_MAX_FRAME = 64 * 1024
MAX_INTEGER_BITS = 14_284  # 4,300 digits: longer ones Python itself neither writes nor reads as text


class FrameError(Exception):
    """The peer sent what is no frame of this protocol; the connection cannot go on."""


class FrameTooLarge(Exception):
    """A payload of ours is over the limit."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"{size} bytes are over max_frame {limit}")


# Texts of models and tools can hold halves of surrogate pairs, which are no UTF-8.
codecs.register_error("prl_replace", lambda error: (b"\xef\xbf\xbd" * (error.end - error.start), error.end))

_encode_strict = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), check_circular=False).encode


def jsonable(value, depth: int = 0):
    """`value` as JSON can hold it: numbers that are not finite, and integers without an end, become null, keys become texts, objects of a library
    become their dump or their text."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= MAX_INTEGER_BITS else None
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if depth > 64:
        return str(value)
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): jsonable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item, depth + 1) for item in value]
    if isinstance(value, (set, frozenset)):
        return [jsonable(item, depth + 1) for item in sorted(value, key=str)]
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return jsonable(dump(mode="json", exclude_none=True), depth + 1)
    as_list = getattr(value, "tolist", None)  # numpy arrays and numbers
    if callable(as_list):
        return jsonable(as_list(), depth + 1)
    return str(value)


def encode_payload(message: dict) -> bytes:
    try:
        text = _encode_strict(message)
    except (TypeError, ValueError, RecursionError):
        text = _encode_strict(jsonable(message))
    return text.encode("utf-8", errors="prl_replace")


def encode_frame(message: dict, max_frame: int) -> bytes:
    """Raises FrameTooLarge."""
    payload = encode_payload(message)
    if len(payload) > max_frame:
        raise FrameTooLarge(len(payload), max_frame)
    return HEADER.pack(len(payload), CODEC_JSON) + payload


class FrameReader:
    """Bytes in, messages out. Raises FrameError."""

    def __init__(self, max_frame: int = DEFAULT_MAX_FRAME) -> None:
        self.max_frame = max_frame
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict]:
        buffer = self._buffer
        buffer += data
        messages = []
        at = 0
        while len(buffer) - at >= HEADER.size:
            length, codec = HEADER.unpack_from(buffer, at)
            if codec != CODEC_JSON:
                raise FrameError(f"codec {codec} instead of {CODEC_JSON} ('J')")
            if length > self.max_frame:
                raise FrameError(f"a frame of {length} bytes is over max_frame {self.max_frame}")
            end = at + HEADER.size + length
            if len(buffer) < end:
                break
            messages.append(self._decode(bytes(buffer[at + HEADER.size : end])))
            at = end
        if at:
            del buffer[:at]
        return messages

    @staticmethod
    def _decode(payload: bytes) -> dict:
        try:
            message = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise FrameError(f"no JSON: {error}") from None
        if not isinstance(message, dict) or not isinstance(message.get("t"), str):
            raise FrameError("no JSON object with a text 't'")
        return message
