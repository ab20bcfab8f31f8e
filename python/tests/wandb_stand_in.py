"""A server that wandb's client takes for Weights & Biases: keeps the rows, files and tables of the runs that are uploaded to it."""
import gzip
import http.server
import json
import re
import threading
import urllib.parse


class Failure(Exception):
    pass


class WandbStandIn:
    """With `with`; `url` is WANDB_BASE_URL, history(run) its rows in their order, files what was uploaded by name. The first num_failures questions about a
    run that is there fail. Writers that share a run (wandb's shared mode) count their rows each for itself: the server puts them one behind the other as they come,
    and counts the steps; writers[run] has the numbers of the rows of each. `views` are the saved views of projects."""

    def __init__(self):
        self.lines, self.files, self.complete, self.problems = {}, {}, {}, []
        self.num_failures, self.artifact_files, self.committed = 0, {}, set()
        self.writers, self.views, self.lock = {}, [], threading.Lock()

    def __enter__(self):
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                text = json.dumps(outer._answer(self.path, body, self.headers.get("X-WANDB-ASYNC-CLIENT-ID"))).encode()
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

    def artifact_tables(self, path):
        """How many artifacts that were committed hold the table of the medium `path`: an artifact has its cells in a file of its own."""
        cells = json.loads(self.files[path])["data"]
        return sum(name in self.committed and file.endswith(".table.json") and json.loads(body)["data"] == cells for (name, file), body in self.artifact_files.items())

    def history(self, run):
        return [json.loads(line) for _, line in sorted(self.lines.get(run, {}).items())]

    def _answer(self, path, body, writer):
        if path == "/graphql":
            request = json.loads(body)
            operation = request.get("operationName") or re.search(r"\b(?:query|mutation)\s+(\w+)", request["query"]).group(1)
            try:
                return {"data": self._query(operation, request.get("variables") or {})}
            except Failure:
                return {"errors": [{"message": "the database does not answer"}]}
        if path.endswith("/file_stream"):
            with self.lock:
                self._take_stream(path.split("/")[-2], json.loads(body), writer)
        elif path.startswith("/storage/"):
            self.files[urllib.parse.unquote(path.removeprefix("/storage/"))] = body
        elif path.startswith("/artifacts/"):
            self.artifact_files[tuple(path.split("/")[2:4])] = body
        return {}

    def _bucket(self, name):
        count = len(self.lines.get(name, {}))
        project = {"id": "cHJvamVjdA==", "name": "p", "entity": {"id": "ZW50aXR5", "name": "e"}}
        return {"id": "cnVu", "name": name, "displayName": name, "description": "", "config": "{}", "sweepName": None, "historyLineCount": count, "eventsLineCount": 0, "logLineCount": 0,
                "state": "running", "user": {"name": "u", "username": "u"}, "systemMetrics": "{}", "projectId": "1",
                "historyKeys": {"lastStep": max([row["_step"] for row in self.history(name)], default=-1), "keys": {}}, "historyTail": "[]", "eventsTail": "[]", "summaryMetrics": "{}", "tags": [], "notes": "", "wandbConfig": "{}", "project": project}

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
        if operation in ("Viewer", "GetDefaultEntity"):
            return {"viewer": {"id": "dmlld2Vy", "entity": "e", "username": "u", "email": "u@e", "flags": "{}", "admin": False, "teams": {"edges": []}, "apiKeys": {"edges": []}}}
        if operation == "ArtifactType":
            return {"project": {"artifact": None}}
        if operation == "RunParquetHistory":
            return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": self.history(variables["runName"])}}}}
        if operation == "SampledHistoryPage":
            spec = json.loads(variables["spec"])
            rows = [{key: row[key] for key in spec["keys"]} for row in self.history(variables["run"]) if all(key in row for key in spec["keys"]) and spec["minStep"] <= row["_step"] <= spec["maxStep"]]
            return {"project": {"run": {"sampledHistory": [rows]}}}
        if operation == "UpsertView2":
            self.views.append({**variables, "spec": json.loads(variables["spec"])})
            return {"upsertView": {"view": {"id": "dmlldw==", "name": variables["name"]}, "inserted": True}}
        if operation == "ProjectViews":
            return {"project": {"allViews": {"edges": [{"node": {"displayName": view["displayName"]}} for view in self.views if (view["entityName"], view["projectName"]) == (variables["entity"], variables["project"])]}}}
        if operation == "CreateArtifact":
            return {"createArtifact": {"artifact": {"id": variables["input"]["clientID"], "state": "PENDING", "artifactSequence": {"id": "c2Vx", "latestArtifact": None}}}}
        if operation == "CreateArtifactManifest":
            file = {"id": "ZmlsZQ==", "name": "wandb_manifest.json", "displayName": "wandb_manifest.json", "uploadUrl": f"{self.url}/artifacts/{variables.get('artifactID')}/manifest", "uploadHeaders": []}
            return {"createArtifactManifest": {"artifactManifest": {"id": "bWFuaWZlc3Q=", "file": file}}}
        if operation == "CreateArtifactFiles":
            nodes = [{"storagePath": one["name"], "uploadUrl": f"{self.url}/artifacts/{one['artifactID']}/{one['name']}", "uploadHeaders": [], "uploadMultipartUrls": None, "artifact": {"id": one["artifactID"]}}
                     for one in variables["input"]["artifactFiles"]]
            return {"createArtifactFiles": {"files": {"edges": [{"node": node} for node in nodes]}}}
        if operation == "CommitArtifact":
            self.committed.add(variables["artifactID"])
            return {"commitArtifact": {"artifact": {"id": variables["artifactID"], "digest": "0"}}}
        if operation in ("Run", "RunHistoryKeys"):
            if self.num_failures > 0 and self.lines.get(name):
                self.num_failures -= 1
                raise Failure
            bucket = self._bucket(name) if name in self.lines else None
            return {"project": {"run": bucket}}
        return {}

    def _take_stream(self, run, request, writer):
        rows = self.lines.setdefault(run, {})
        own = self.writers.setdefault(run, {}).setdefault(writer, {}) if writer else None
        for file, chunk in (request.get("files") or {}).items():
            if file != "wandb-history.jsonl":
                continue
            for number, line in enumerate(chunk["content"], chunk["offset"]):
                if own is not None:
                    number = own.setdefault(number, len(rows))
                    line = json.dumps({**json.loads(line), "_step": number})
                if rows.get(number, line) != line:
                    self.problems.append(f"row {number} of {run} is overwritten")
                rows[number] = line
        if request.get("complete"):
            self.complete[run] = request.get("exitcode")
