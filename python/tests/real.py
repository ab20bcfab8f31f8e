"""Tests with the real packages: one worker for a whole class, in its own virtual environment."""

import asyncio
import os
import sys
import threading
import unittest

import venvs
from peer import ROOT, WAIT_S, Peer, say

ENVS = ROOT / "tests/python_envs"


def interpreter(kind):
    """Exits with 77 and one line where there is none: in ctest it is only used, by hand it is made."""
    python = venvs.ready(kind)
    if python is None and "PRL_TEST_SKIP_WITHOUT_VENV" not in os.environ:
        try:
            python = venvs.make(kind)
        except venvs.CannotInstall as error:
            print(f"skipped: {error}")
            sys.exit(77)
    if python is None:
        print(f"skipped: no virtual environment {kind}; python/tests/venvs.py {kind} makes it from PyPI")
        sys.exit(77)
    return python


def main(module_python):
    """`python` of the module is set before its tests run."""
    module = sys.modules["__main__"]
    module.PYTHON = interpreter(module_python)
    unittest.main()


class SharedWorker(unittest.TestCase):
    """`kind` and `paths` are the subclass's; `self.go(coroutine)` runs in the loop that has the peer."""

    kind = ""

    @classmethod
    def setUpClass(cls):
        cls.loop = asyncio.new_event_loop()
        threading.Thread(target=cls.loop.run_forever, daemon=True).start()
        cls.runs = 0
        cls.peer = Peer(sys.modules["__main__"].PYTHON)

        async def start():
            await cls.peer.start()
            await cls.peer.hello(log_level="warning")

        cls._go(start())

    @classmethod
    def tearDownClass(cls):
        cls._go(cls.peer.stop())
        cls.loop.call_soon_threadsafe(cls.loop.stop)

    @classmethod
    def _go(cls, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, cls.loop).result(WAIT_S * 4)

    def go(self, coroutine):
        return self._go(coroutine)

    def setUp(self):
        self.peer.calls.clear()
        self.peer.logs.clear()
        self.peer.model = lambda call: say("?")
        type(self).runs += 1
        self.key = f"e{self.runs}"

    def load(self, env_id, *, expect="loaded", **message):
        paths = [str(ENVS), str(ENVS / self.kind)]
        return self.go(self.peer.load(env_id, "auto", env_key=self.key, paths=paths, expect=expect, **message))

    def page(self, split="train", offset=0, limit=100):
        return self.go(self.peer.request("tasks", env_key=self.key, split=split, offset=offset, limit=limit))["tasks"]

    def play(self, index=0, **message):
        """The terminal message of a rollout of the row, as the orchestrator starts it."""
        type(self).runs += 1
        if "data" not in message:
            message["data"] = self.page(message.get("split", "train"), index, 1)[0]["data"]
        return self.go(self.peer.run(f"r{self.runs}", env_key=self.key, index=index, **message))

    def check_brief(self, index, model):
        """A brief sample and the model calls say what a whole one says. `model` gives the peer's model of one rollout."""
        self.peer.model = model()
        whole = self.sample(index)
        self.peer.model = model()
        replies = {}

        def answer(call, ask=self.peer.model):
            replies[call["call_id"]] = ask(call)
            return replies[call["call_id"]]

        self.peer.model = answer
        brief = self.sample(index, want={"brief": True})
        self.assertNotIn("prompt", brief)
        last = self.peer.calls[-1]
        self.assertEqual(brief["calls"][-1], last["call_id"])
        known = [*last["messages"], replies[last["call_id"]]["message"]]
        size = brief["prompt_size"]
        self.assertEqual((known[:size], [*known[size:], *brief.get("completion", [])], brief.get("tools", [])), (whole["prompt"], whole["completion"], whole["tools"]))
        return brief

    def sample(self, index=0, **message):
        terminal = self.play(index, **message)
        self.assertEqual(terminal["t"], "result", terminal)
        self.assertEqual(len(terminal["samples"]), 1)
        return terminal["samples"][0]
