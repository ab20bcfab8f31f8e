"""Rows of a task set: hashes, pages, fingerprints."""

import hashlib
import json

from prl_worker.framing import jsonable

FINGERPRINT_ROWS = 64
MAX_PAGE_BYTES = 4 * 1024 * 1024


def canonical(data) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=str)


def row_hash(data) -> str:
    return hashlib.sha256(canonical(data).encode()).hexdigest()


def fingerprint(num_tasks: int | None, first_rows: list) -> str:
    digest = hashlib.sha256(f"{num_tasks}\n".encode())
    for row in first_rows[:FINGERPRINT_ROWS]:
        digest.update(canonical(row).encode())
        digest.update(b"\n")
    return digest.hexdigest()


def task_entry(index: int, data: dict, *, task_id: str | None = None, prompt=None, answer=None, info=None, with_data: bool = True) -> dict:
    clean = jsonable(data)
    entry = {
        "index": index,
        "id": task_id if task_id is not None else str(index),
        "hash": row_hash(clean),
        "prompt": jsonable(prompt),
        "answer": answer,
        "info": jsonable(info),
    }
    if with_data:
        entry["data"] = clean
    return entry


def page(entries, limit: int) -> list[dict]:
    """The first entries that fit a page; always one if there is one."""
    taken: list[dict] = []
    size = 0
    for entry in entries:
        size += len(canonical(entry))
        if taken and (size > MAX_PAGE_BYTES or len(taken) >= limit):
            break
        taken.append(entry)
        if len(taken) >= limit:
            break
    return taken
