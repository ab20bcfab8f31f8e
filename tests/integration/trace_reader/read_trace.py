"""What Perfetto's trace processor finds in a trace, by Perfetto's own Python API: one JSON object.

    read_trace.py TRACE BIN_PATH      in an environment with the package `perfetto`
"""
import json
import os
import sys
import tempfile

from perfetto.trace_processor import TraceProcessor, TraceProcessorConfig

QUERIES = {
    # Spans of threads: lane, name, begin and duration in ns, the argument `step`.
    "spans": "select thread.name as lane, slice.name as name, slice.ts as ts, slice.dur as dur, extract_arg(slice.arg_set_id, 'args.step') as step "
             "from slice join thread_track on slice.track_id = thread_track.id join thread using (utid) order by slice.ts",
    "asynchronous": "select slice.name as name, slice.ts as ts, slice.dur as dur, process.name as process from slice join process_track on slice.track_id = process_track.id "
                    "join process using (upid) order by slice.ts",
    "processes": "select name from process where name is not null order by name",
    "problems": "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
}


def main():
    trace, shell = sys.argv[1:]
    # The API kills its program: what that has left lies here.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as left:
        os.environ["TMPDIR"] = left
        read(trace, shell)


def read(trace, shell):
    with TraceProcessor(trace=trace, config=TraceProcessorConfig(bin_path=shell, load_timeout=240)) as reader:
        print(json.dumps({what: [dict(vars(row)) for row in reader.query(sql)] for what, sql in QUERIES.items()}))


if __name__ == "__main__":
    main()
