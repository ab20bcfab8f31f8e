"""The worker in front of an environment server of verifiers 0.4: the rollouts of the server are those that the worker plays itself."""

import sys

import env_servers
from env_servers import told
from peer import fail, say
from real import SharedWorker, main


def server(env_id):
    return env_servers.environment_server(sys.modules["__main__"].PYTHON, env_servers.V1, env_id)


class V1Server(SharedWorker):
    kind = "v1"

    def test_several_turns(self):
        samples = []
        with server("prl-guess-v1") as address:
            for relay in ("", address):
                self.setUp()
                self.load("prl-guess-v1", relay=relay)
                guesses = iter(["50", "25", "38"])
                self.peer.model = lambda call: say(next(guesses))
                sample = self.sample(1)
                self.assertEqual(sample["calls"], [call["call_id"] for call in self.peer.calls])
                self.assertEqual([call["turn"] for call in self.peer.calls], [0, 1, 2])
                self.assertEqual({(call["purpose"], call["session_id"]) for call in self.peer.calls}, {("policy", sample["session_id"])})
                samples.append(told(sample))
            self.assertEqual(samples[1], samples[0])
            self.peer.model = lambda call: fail("provider", "down", 503)
            failed = self.sample(1)
            self.assertEqual((failed["ok"], failed["error"]["class"]), (False, "provider"), failed)
            # An address ends with its rollout, and the next one has a right to it.
            self.peer.model = lambda call: None
            terminal = self.play(1, deadline_s=1.0)
            self.assertEqual((terminal["t"], terminal["error"]["class"]), ("failed", "timeout"))
            guesses = iter(["50", "25", "38"])
            self.peer.model = lambda call: say(next(guesses))
            self.assertEqual(self.sample(1)["num_turns"], 3)
        # The server has gone, and the library's own client would wait for ever.
        lost = self.play(1)
        self.assertEqual((lost["t"], lost["error"]["class"], lost["error"]["retryable"]), ("failed", "infra", True), lost)

    def test_several_agents(self):
        samples = []
        with server("prl-duel-v1") as address:
            for relay in ("", address):
                self.setUp()
                self.load("prl-duel-v1", relay=relay)
                self.peer.model = lambda call: say("7" if call["session_id"].endswith("/1") else "5")
                terminal = self.play(0)
                self.assertEqual(terminal["t"], "result", terminal)
                samples.append({sample["seat"]: (told(sample), len(sample["calls"]), sample["trainable"]) for sample in terminal["samples"]})
        self.assertEqual(samples[1], samples[0])


if __name__ == "__main__":
    main("v1")
