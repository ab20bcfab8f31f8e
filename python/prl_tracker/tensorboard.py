"""TensorBoard's event files, written without its package: one folder per role, one file per start of this program.

A file is records of {length, its checksum, an Event, its checksum}; an Event is a protocol buffer.
"""
import os
import pathlib
import socket
import struct
import time

from prl_tracker import follow

_NAME = "events.out.tfevents."


def _crc_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = (byte >> 1) ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_TABLE = _crc_table()


def masked_crc(data):
    """CRC-32C, rotated and shifted as TFRecord files want it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def record(event):
    length = struct.pack("<Q", len(event))
    return length + struct.pack("<I", masked_crc(length)) + event + struct.pack("<I", masked_crc(event))


def records(data):
    """(event, where it ends) of each whole record."""
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        if struct.unpack_from("<I", data, at + 8)[0] != masked_crc(data[at:at + 8]) or at + 16 + length > len(data):
            return
        event = data[at + 12:at + 12 + length]
        if struct.unpack_from("<I", data, at + 12 + length)[0] != masked_crc(event):
            return
        at += 16 + length
        yield event, at


def _varint(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _text(field, data):
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def scalar_event(when, step, metrics):
    values = b"".join(_text(1, _text(1, tag.encode()) + struct.pack("<Bf", 2 << 3 | 5, value)) for tag, value in metrics.items())
    return struct.pack("<Bd", 1 << 3 | 1, when) + _varint(2 << 3) + _varint(step) + _text(5, values)


def restart_event(when, step):
    """Tells readers to forget what came before at this step and later ones."""
    return struct.pack("<Bd", 1 << 3 | 1, when) + _varint(2 << 3) + _varint(step) + _text(7, _varint(1 << 3) + _varint(1))


def time_and_step(event):
    """Of an event of ours that holds values; None for others."""
    if len(event) < 11 or event[0] != 9 or event[9] != 16:
        return None
    step, shift, at = 0, 0, 10
    while True:
        step |= (event[at] & 127) << shift
        shift += 7
        at += 1
        if event[at - 1] < 128:
            break
    is_values = at < len(event) and event[at] == (5 << 3 | 2)
    return (struct.unpack_from("<d", event, 1)[0], step) if is_values else None


class TensorBoard:
    name = "tensorboard"

    def __init__(self, settings):
        self.root = pathlib.Path(settings["run_folder"]) / settings["tensorboard"]["path"]
        self.files = {}
        self.newest = {}

    def open(self):
        delivered = set()
        for path in sorted(self.root.glob(f"*/{_NAME}*")):
            data, end = path.read_bytes(), 0
            for event, end in records(data):
                found = time_and_step(event)
                if found:
                    role = path.parent.name
                    delivered.add(follow.identity(role if role != "run" else "", found[1], found[0]))
                    self.newest[role] = max(self.newest.get(role, found[1]), found[1])
            if end < len(data):
                os.truncate(path, end)  # half a record, of a process that was killed
        return delivered

    def _file(self, role):
        if role not in self.files:
            folder = self.root / role
            folder.mkdir(parents=True, exist_ok=True)
            number = len(list(folder.iterdir()))
            path = folder / f"{_NAME}{int(time.time()):010d}.{number:06d}.{socket.gethostname()}.{os.getpid()}"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
            os.write(fd, record(struct.pack("<Bd", 9, time.time()) + _text(3, b"brain.Event:2")))
            self.files[role] = fd
        return self.files[role]

    def send(self, row):
        role = row.role.replace("/", "_") or "run"
        fd = self._file(role)
        data = b""
        if row.step <= self.newest.get(role, row.step - 1):  # the run was resumed from an older step
            data = record(restart_event(row.time, row.step))
        self.newest[role] = row.step
        os.write(fd, data + record(scalar_event(row.time, row.step, row.metrics)))

    def finish(self):
        for fd in self.files.values():
            os.fsync(fd)
            os.close(fd)
        return f"tensorboard --logdir {self.root}"
