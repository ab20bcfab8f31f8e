"""The worker in front of an environment server of verifiers 0.3.1: the rollouts of the server are those that the worker plays itself."""

import contextlib
import sys

import env_servers
from env_servers import told
from peer import fail, say
from real import SharedWorker, main


def server(env_id):
    return env_servers.environment_server(sys.modules["__main__"].PYTHON, env_servers.LEGACY, env_id)


class LegacyServer(SharedWorker):
    kind = "legacy"

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        # One for all tests: two processes that import the library.
        cls.servers = contextlib.ExitStack()
        cls.guess = cls.servers.enter_context(server("prl-guess"))

    @classmethod
    def tearDownClass(cls):
        cls.servers.close()
        super().tearDownClass()

    def both(self, env_id, address, model, index=1, **message):
        """The sample of a rollout that the worker plays itself, and of one at a server."""
        samples = []
        for relay in ("", address):
            self.setUp()
            self.load(env_id, relay=relay)
            self.peer.model = model()
            samples.append(self.sample(index, **message))
            self.assertEqual(samples[-1]["calls"], [call["call_id"] for call in self.peer.calls])
            self.assertEqual([call["turn"] for call in self.peer.calls], list(range(len(self.peer.calls))))
            self.assertEqual({(call["purpose"], call["trainable"], call["session_id"]) for call in self.peer.calls}, {("policy", True, self.peer.calls[0]["session_id"])})
        self.assertEqual(told(samples[1]), told(samples[0]))
        return samples[1]

    def test_several_turns(self):
        def model():
            guesses = iter(["50", "25", "38"])
            return lambda call: say(next(guesses))

        sample = self.both("prl-guess", self.guess, model)
        self.assertEqual((sample["num_turns"], sample["reward"]), (3, 1.0 + 0.25 / 3))

    def test_tools(self):
        replies = [say(None, tool_calls=[("add", {"a": 1, "b": 4}), ("multiply", {"a": 2, "b": 3})]), say("It is 5.")]
        with server("prl-calculator") as address:
            sample = self.both("prl-calculator", address, lambda: lambda call: replies[call["turn"]])
        self.assertEqual(sample["num_turns"], 2)

    def test_failures(self):
        self.load("prl-guess", relay=self.guess)
        self.peer.model = lambda call: fail("provider", "down", 503)
        terminal = self.play(1)
        error = terminal["error"] if terminal["t"] == "failed" else terminal["samples"][0]["error"]
        self.assertEqual(error["class"], "provider", terminal)
        self.peer.model = lambda call: fail("auth", "no key", 401)
        terminal = self.play(1)
        self.assertEqual((terminal["t"], terminal["error"]["class"], terminal["error"]["retryable"]), ("failed", "provider", False), terminal)
        self.peer.model = lambda call: fail("overlong", "too long", 400)
        sample = self.sample(1)
        self.assertTrue(sample["is_truncated"], sample)
        # An address ends with its rollout, and the next one has a right to it.
        self.peer.model = lambda call: None
        terminal = self.play(1, deadline_s=1.0)
        self.assertEqual((terminal["t"], terminal["error"]["class"]), ("failed", "timeout"))
        guesses = iter(["50", "25", "38"])
        self.peer.model = lambda call: say(next(guesses))
        self.assertEqual(self.sample(1)["num_turns"], 3)

    def test_what_a_server_cannot_do(self):
        failed = self.load("prl-ranked", relay="tcp://127.0.0.1:1", expect="failed")
        self.assertIn("whole groups", failed["error"]["message"])


if __name__ == "__main__":
    main("legacy")
