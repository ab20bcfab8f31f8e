"""A chat API with scripted replies, for tests that need a model which does as it is told. Standard library only."""
import contextlib
import http.server
import json
import threading


class Server:
    """A chat API. `answer(body)` gives the message of a reply, or (status, error text); every request is kept."""

    def __init__(self, answer, model="m"):
        self.requests, self.paths, self.headers = [], [], []
        self.lock = threading.Lock()
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def reply(self, status, body):
                data = json.dumps(body).encode()
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def do_GET(self):
                if self.path.endswith("/models"):
                    return self.reply(200, {"object": "list", "data": [{"id": model, "object": "model"}]})
                self.reply(404, {"error": {"message": "no such route"}})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with owner.lock:
                    owner.paths.append(self.path)
                    owner.headers.append(dict(self.headers))
                    owner.requests.append(body)
                if not self.path.endswith("/chat/completions"):
                    return self.reply(200, {})
                made = answer(body)
                if isinstance(made, tuple):
                    return self.reply(made[0], {"error": {"message": made[1]}})
                finish = "tool_calls" if made.get("tool_calls") else "stop"
                self.reply(200, {"id": "c", "object": "chat.completion", "created": 1, "model": model,
                                 "choices": [{"index": 0, "message": {"role": "assistant", **made}, "finish_reason": finish}],
                                 "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}})

        class Listener(http.server.ThreadingHTTPServer):
            request_queue_size = 1024  # five, the default, refuses clients that come at once

        self.http = Listener(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self):
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()
