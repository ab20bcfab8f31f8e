"""A server that `wandb sync` takes for Weights & Biases: keeps the rows of the runs that are uploaded to it."""
import gzip
import http.server
import json
import threading


class WandbStandIn:
    """With `with`; `url` is WANDB_BASE_URL, history(run) its rows in their order, files the names that were uploaded."""

    def __init__(self):
        self.lines, self.files, self.complete, self.problems = {}, set(), {}, []

    def __enter__(self):
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                text = json.dumps(outer._answer(self.path, body)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = answer

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def history(self, run):
        return [json.loads(line) for _, line in sorted(self.lines.get(run, {}).items())]

    def _answer(self, path, body):
        if path == "/graphql":
            request = json.loads(body)
            return {"data": self._query(request.get("operationName"), request.get("variables") or {})}
        if path.endswith("/file_stream"):
            self._take_stream(path.split("/")[-2], json.loads(body))
        elif path.startswith("/storage/"):
            self.files.add(path.removeprefix("/storage/"))
        return {}

    def _bucket(self, name):
        count = len(self.lines.get(name, {}))
        project = {"id": "cHJvamVjdA==", "name": "p", "entity": {"id": "ZW50aXR5", "name": "e"}}
        return {"id": "cnVu", "name": name, "displayName": name, "description": "", "config": "{}", "sweepName": None, "historyLineCount": count, "eventsLineCount": 0, "logLineCount": 0,
                "historyTail": "[]", "eventsTail": "[]", "summaryMetrics": "{}", "tags": [], "notes": "", "wandbConfig": "{}", "project": project}

    def _query(self, operation, variables):
        name = variables.get("name")
        if operation == "UpsertBucket":
            return {"upsertBucket": {"inserted": name not in self.lines, "bucket": self._bucket(name)}}
        if operation == "RunResumeStatus":
            bucket = self._bucket(name) if name in self.lines else None
            return {"model": {"id": "cHJvamVjdA==", "name": "p", "entity": {"id": "ZW50aXR5", "name": "e"}, "bucket": bucket}}
        if operation == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/storage/{file}"} for file in variables["files"]]
            return {"createRunFiles": {"runID": "cnVu", "uploadHeaders": [], "files": files}}
        return {}

    def _take_stream(self, run, request):
        rows = self.lines.setdefault(run, {})
        for file, chunk in (request.get("files") or {}).items():
            if file != "wandb-history.jsonl":
                continue
            for number, line in enumerate(chunk["content"], chunk["offset"]):
                if rows.get(number, line) != line:
                    self.problems.append(f"row {number} of {run} is overwritten")
                rows[number] = line
        if request.get("complete"):
            self.complete[run] = request.get("exitcode")
