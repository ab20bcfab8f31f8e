#!/usr/bin/env python3
"""Makes tests/fixtures/parquet: files as pyarrow writes them, and their rows as JSON lines.

    python3 tools/make_parquet_fixtures.py        needs pyarrow

rows.jsonl belongs to all types_*.parquet (the same table under other compressions, page versions and encodings),
chat.jsonl to chat.parquet, legacy.jsonl to legacy.parquet. images.parquet has conversations with the pictures of tests/golden/vision in the
columns that data sets of Hugging Face have for them.
"""
import datetime as dt
import decimal
import json
import pathlib
import random
import uuid

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = pathlib.Path(__file__).resolve().parent.parent
OUT = ROOT / "tests/fixtures/parquet"
WORDS = ["alpha", "beta", "", "Grüße", "日本語", "emoji 🎉", "tab\tnew\nline", 'quote " back \\ slash', "\u0001", "a" * 300]


def write_images():
    part = pa.struct([("type", pa.string()), ("text", pa.string())])
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = []
    for names in (["grey.png"], ["photo.jpg", "grey.png"]):
        shown = [{"type": "image", "text": None} for _ in names]
        rows.append({"messages": [{"role": "user", "content": [*shown, {"type": "text", "text": "What?"}]},
                                  {"role": "assistant", "content": [{"type": "text", "text": "Seen"}]}],
                     "images": [{"bytes": (ROOT / "tests/golden/vision" / name).read_bytes(), "path": name} for name in names]})
    table = pa.Table.from_pylist(rows, schema=pa.schema([("messages", pa.list_(message)), ("images", pa.list_(image))]))
    pq.write_table(table, OUT / "images.parquet", compression="zstd")


def write_no_rows():
    """A shard of a data set from which everything was filtered: pyarrow writes a row group without rows, whose columns have no pages."""
    message = pa.struct([("role", pa.string()), ("content", pa.string())])
    pq.write_table(pa.table({"messages": pa.array([], pa.list_(message))}), OUT / "no_rows.parquet")


def types_table(rows=260):
    rng = random.Random(3)

    def some(make, nulls=0.2):
        return [None if rng.random() < nulls else make() for _ in range(rows)]

    epoch = dt.datetime(1970, 1, 1)
    instant = lambda: epoch + dt.timedelta(microseconds=rng.randrange(-10**15, 4 * 10**15))
    columns = {
        "flag": (pa.bool_(), some(lambda: rng.random() < 0.5)),
        "flag_required": (pa.bool_(), [i % 3 == 0 for i in range(rows)]),
        "i8": (pa.int8(), some(lambda: rng.randrange(-128, 128))),
        "u8": (pa.uint8(), some(lambda: rng.randrange(256))),
        "i32": (pa.int32(), some(lambda: rng.randrange(-2**31, 2**31))),
        "u32": (pa.uint32(), some(lambda: rng.randrange(2**32))),
        "i64": (pa.int64(), some(lambda: rng.randrange(-2**63, 2**63))),
        "u64": (pa.uint64(), some(lambda: rng.randrange(2**64))),
        "row": (pa.int64(), list(range(rows))),
        "f32": (pa.float32(), some(lambda: rng.choice([0.5, -1.25, 3.0e10, float("nan"), 1.0]))),
        "f64": (pa.float64(), some(lambda: rng.choice([rng.random(), -1e300, float("inf"), 5.0]))),
        "text": (pa.string(), some(lambda: rng.choice(WORDS))),
        "text_required": (pa.string(), [f"row {i} {rng.choice(WORDS)}" for i in range(rows)]),
        "large": (pa.large_string(), some(lambda: rng.choice(WORDS))),
        "day": (pa.date32(), some(lambda: (epoch + dt.timedelta(days=rng.randrange(-40000, 40000))).date())),
        "at_ms": (pa.timestamp("ms"), some(lambda: instant().replace(microsecond=rng.randrange(1000) * 1000))),
        "at_us_utc": (pa.timestamp("us", tz="UTC"), some(lambda: instant().replace(tzinfo=dt.timezone.utc))),
        "clock": (pa.time64("us"), some(lambda: (epoch + dt.timedelta(microseconds=rng.randrange(86400 * 10**6))).time())),
        "money": (pa.decimal128(12, 3), some(lambda: decimal.Decimal(rng.randrange(-10**10, 10**10)).scaleb(-3))),
        "fixed": (pa.binary(4), some(lambda: rng.choice([b"abcd", b"wxyz"]))),
        "numbers": (pa.list_(pa.int32()), some(lambda: [rng.choice([None, rng.randrange(100)]) for _ in range(rng.randrange(4))])),
        "nested": (pa.list_(pa.list_(pa.string())),
                   some(lambda: [None if rng.random() < 0.2 else [rng.choice(WORDS[:4]) for _ in range(rng.randrange(3))]
                                 for _ in range(rng.randrange(3))])),
        "pair": (pa.struct([("a", pa.int32()), ("b", pa.struct([("c", pa.string())]))]),
                 some(lambda: {"a": rng.choice([None, 5]), "b": rng.choice([None, {"c": None}, {"c": "x"}])})),
        "map": (pa.map_(pa.string(), pa.int32()), some(lambda: [(w, rng.randrange(9)) for w in WORDS[:rng.randrange(3)]])),
        "nothing": (pa.null(), [None] * rows),
    }
    required = {"flag_required", "text_required", "row"}
    schema = pa.schema([pa.field(n, t, nullable=n not in required) for n, (t, _) in columns.items()])
    return pa.table([pa.array(v, t) for t, v in columns.values()], schema=schema)


def plain(value):
    """What the reader writes for a value."""
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, decimal.Decimal):
        return float(value)
    if isinstance(value, dt.datetime):
        text = value.replace(tzinfo=None).isoformat()
        return text + ("Z" if value.tzinfo else "")
    if isinstance(value, (dt.date, dt.time)):
        return value.isoformat()
    if isinstance(value, uuid.UUID):
        return str(value)
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    return value


def write_rows(table, name):
    lines = []
    for row in table.to_pylist():
        if "map" in row and row["map"] is not None:
            row["map"] = dict(row["map"])
        lines.append(json.dumps({k: plain(v) for k, v in row.items()}, ensure_ascii=False))
    (OUT / name).write_text("\n".join(lines) + "\n")


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    table = types_table()
    write_rows(table, "rows.jsonl")
    flat = [f.name for f in table.schema if not pa.types.is_nested(f.type)]
    delta = {"i32": "DELTA_BINARY_PACKED", "i64": "DELTA_BINARY_PACKED", "row": "DELTA_BINARY_PACKED", "u32": "DELTA_BINARY_PACKED",
             "text": "DELTA_BYTE_ARRAY", "text_required": "DELTA_BYTE_ARRAY", "large": "DELTA_LENGTH_BYTE_ARRAY",
             "f32": "BYTE_STREAM_SPLIT", "f64": "BYTE_STREAM_SPLIT", "fixed": "BYTE_STREAM_SPLIT", "flag": "RLE"}
    assert set(delta) <= set(flat)
    pq.write_table(table, OUT / "types_snappy_dictionary.parquet", compression="snappy", row_group_size=100, data_page_size=500)
    pq.write_table(table, OUT / "types_none_plain.parquet", compression="none", use_dictionary=False, data_page_version="1.0")
    pq.write_table(table, OUT / "types_zstd_v2.parquet", compression="zstd", data_page_version="2.0", data_page_size=300, row_group_size=97)
    pq.write_table(table, OUT / "types_gzip_delta.parquet", compression="gzip", data_page_version="2.0", use_dictionary=False,
                   column_encoding=delta)
    pq.write_table(table.select(["text", "at_us_utc", "numbers"]), OUT / "legacy.parquet", compression="snappy",
                   use_deprecated_int96_timestamps=True, use_compliant_nested_type=False, version="1.0")
    legacy = table.select(["text", "at_us_utc", "numbers"]).to_pylist()
    for row in legacy:
        if row["at_us_utc"]:
            row["at_us_utc"] = row["at_us_utc"].replace(tzinfo=None)
    (OUT / "legacy.jsonl").write_text("\n".join(json.dumps({k: plain(v) for k, v in row.items()}, ensure_ascii=False) for row in legacy) + "\n")
    pq.write_table(table.select(["text", "i32"]).slice(0, 40), OUT / "brotli.parquet", compression="brotli")

    call = pa.struct([("name", pa.string()), ("arguments", pa.string())])
    message = pa.struct([("role", pa.string()), ("content", pa.string()), ("tool_calls", pa.list_(call))])
    rng = random.Random(5)
    rows = []
    for i in range(120):
        messages = [{"role": "user", "content": f"question {i} {rng.choice(WORDS)}", "tool_calls": None}]
        if i % 3 == 0:
            messages.append({"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": '{"x": %d}' % i}] * (i % 2 + 1)})
            messages.append({"role": "tool", "content": str(i), "tool_calls": []})
        messages.append({"role": "assistant", "content": f"answer {i}", "tool_calls": None})
        rows.append({"id": i, "messages": messages, "source": rng.choice(["web", "book"])})
    chat = pa.Table.from_pylist(rows, schema=pa.schema([("id", pa.int64()), ("messages", pa.list_(message)), ("source", pa.string())]))
    pq.write_table(chat, OUT / "chat.parquet", compression="zstd", row_group_size=50)
    write_rows(chat, "chat.jsonl")
    write_images()
    write_no_rows()
    for file in sorted(OUT.iterdir()):
        print(file.name, file.stat().st_size)


main()
