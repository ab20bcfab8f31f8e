"""The worker with verifiers 0.4.0: environments of the v1 API."""

import asyncio
import difflib
import json
import os
import pathlib
import unittest

from peer import fail, say
from real import ENVS, SharedWorker, main

NATIVE_ROWS = pathlib.Path(__file__).parent / "reverse_text_rows.json"


class V1(SharedWorker):
    kind = "v1"

    def test_reverse_text_equals_the_native_one(self):
        native = json.loads(NATIVE_ROWS.read_text())
        for split in ("eval", "train"):
            self.key += split
            loaded = self.load("org/prl-reverse-text-v1@1.0", env_args={"num_train": 50, "num_eval": 20, "split": split})
            self.assertEqual((loaded["kind"], loaded["splits"]["train"]["num_tasks"]), ("v1", 50 if split == "train" else 20))
            rows = self.page()
            self.assertEqual([(row["prompt"][-1]["content"], row["answer"]) for row in rows[: len(native[split])]], [tuple(row) for row in native[split]])
        self.assertTrue(loaded["splits"]["eval"]["same_as_train"])
        row = rows[3]
        for said in (row["answer"], row["answer"][:-3], ""):
            self.peer.model = lambda call: say(f"<reversed_text>{said}</reversed_text>")
            sample = self.sample(3)
            self.assertEqual(sample["reward"], difflib.SequenceMatcher(None, said.strip(), row["answer"]).ratio())
        call = self.peer.calls[0]
        self.assertEqual((call["messages"], call["purpose"], call["trainable"], call["seat"]), (row["prompt"], "policy", True, "agent"))
        self.assertEqual((sample["prompt"], sample["completion"][0]["content"]), (row["prompt"], "<reversed_text></reversed_text>"))

    def test_sampling(self):
        self.load("prl-reverse-text-v1")
        self.sample(0, sampling={"temperature": 0.5, "max_tokens": 9, "top_k": 4})
        self.assertEqual(self.peer.calls[0]["sampling"], {"temperature": 0.5, "max_tokens": 9, "top_k": 4})

    def test_several_turns(self):
        self.load("prl-guess-v1")
        guesses = iter(["50", "25", "38"])
        self.peer.model = lambda call: say(next(guesses))
        sample = self.sample(1)
        self.assertEqual((sample["reward"], sample["num_turns"], sample["metrics"]), (1.0 + 0.25 / 3, 3, {"guesses": 3.0}))
        self.assertEqual([message["content"] for message in sample["completion"]], ["50", "Lower.", "25", "Higher.", "38"])
        self.assertEqual(sample["calls"], [call["call_id"] for call in self.peer.calls])
        self.assertEqual({call["session_id"] for call in self.peer.calls}, {sample["session_id"]})
        for earlier, later in zip(self.peer.calls, self.peer.calls[1:]):
            self.assertEqual(later["messages"][: len(earlier["messages"])], earlier["messages"])

    def test_brief_results(self):
        self.load("prl-guess-v1")

        def guesses():
            said = iter(["50", "25", "38"])
            return lambda call: say(next(said))

        self.check_brief(1, guesses)

    def test_limits(self):
        loaded = self.load("prl-guess-v1", limits={"num_train": 7}, env_config={"agent": {"max_turns": 2}})
        self.assertEqual(loaded["splits"]["train"]["num_tasks"], 7)
        sample = self.sample(1)
        self.assertEqual((sample["num_turns"], sample["stop_condition"], sample["is_truncated"], sample["ok"]), (2, "max_turns", True, True))

    def calculate(self, tools):
        self.key += tools
        self.load("prl-calculator-v1", env_config={"tools": tools})
        self.peer.calls.clear()
        first = [("calculator_add", {"a": 1, "b": 4}), ("calculator_fail", {}), ("calculator_add", {"a": "z"}), ("calculator_add", "{broken"), ("nothing", {})]
        self.peer.model = lambda call: say(None, tool_calls=first) if call["turn"] == 0 else say("It is 5.")
        sample = self.sample(1)
        self.assertEqual((sample["reward"], sample["metrics"]["tool_calls"], sample["completion"][1]["content"]), (1.0, 5.0, "5"))
        self.assertIn("the tool is broken", sample["completion"][2]["content"])
        self.assertIn("unknown tool", sample["completion"][5]["content"])
        return [call["messages"] for call in self.peer.calls], [call["tools"] for call in self.peer.calls]

    def test_tools_are_the_same_here_and_in_processes(self):
        self.assertEqual(self.calculate("in_process"), self.calculate("process"))

    def test_tools_with_state(self):
        self.load("prl-counter-v1")
        replies = [say(None, tool_calls=[("count", {"step": 2}), ("count", {"step": 1})]), say("done")]
        self.peer.model = lambda call: replies[call["turn"]]
        sample = self.sample(1)
        self.assertEqual((sample["reward"], sample["completion"][2]["content"]), (1.0, "The counter stands at 3 apples."))
        replies[0] = say(None, tool_calls=[("count", {"step": 9})])
        sample = self.sample(1)
        self.assertEqual((sample["reward"], sample["stop_condition"], sample["num_turns"]), (0.0, "overshot", 1))

    def test_states_of_rollouts_do_not_mix(self):
        self.load("prl-counter-v1")
        self.peer.model = lambda call: say(None, tool_calls=[("count", {"step": 1})]) if call["turn"] < 3 else say("done")

        async def play():
            data = (await self.peer.request("tasks", env_key=self.key, split="train", offset=1, limit=1))["tasks"][0]["data"]
            return await asyncio.gather(*(self.peer.start_run(f"{self.key}-{i}", env_key=self.key, index=1, data=data) for i in range(20)))

        self.assertEqual([terminal["samples"][0]["reward"] for terminal in self.go(play())], [1.0] * 20)

    def test_judges_call_back(self):
        self.load("prl-judged-v1")
        self.peer.model = lambda call: say("yes" if call["purpose"] == "judge" else "2")
        self.assertEqual(self.sample(1)["reward"], 1.0)
        judge = self.peer.calls[1]
        self.assertEqual((judge["model"], judge["trainable"], judge["sampling"]), ("a-judge", False, {"temperature": 0.0, "max_tokens": 4}))
        self.peer.model = lambda call: fail("refused", "judges are not allowed", 403) if call["purpose"] == "judge" else say("2")
        sample = self.sample(1)
        self.assertEqual((sample["ok"], sample["error"]["type"]), (False, "TaskError"))
        self.assertIn("judges are not allowed", sample["error"]["message"])

    def test_seats(self):
        loaded = self.load("prl-duel-v1")
        self.assertEqual(([seat["name"] for seat in loaded["seats"]], loaded["splits"]["train"]["infinite"]), (["first", "second", "reader"], True))
        self.peer.model = lambda call: say({"first": "short", "second": "much longer", "reader": "1"}[call["seat"]])
        terminal = self.play(3)
        samples = terminal["samples"]
        self.assertEqual([(sample["seat"], sample["trainable"], sample["reward"]) for sample in samples], [("first", True, 1.0), ("second", True, 0.0), ("reader", False, None)])
        self.assertEqual(len({sample["session_id"] for sample in samples}), 3)
        self.assertEqual([[call["call_id"]] for call in self.peer.calls], [sample["calls"] for sample in samples])
        self.assertEqual([call["trainable"] for call in self.peer.calls], [True, True, False])

    def test_endless_rows(self):
        self.load("prl-duel-v1", limits={"num_eval": 5})
        rows = self.page(offset=40, limit=3)
        self.assertEqual([row["prompt"][0]["content"] for row in rows], [f"Say something short about {i}." for i in (40, 41, 42)])
        self.assertEqual(self.page(offset=2, limit=1)[0]["index"], 2)
        self.assertEqual(len(self.page("eval", limit=50)), 5)

    def test_errors_of_the_model(self):
        self.load("prl-guess-v1")
        self.peer.model = lambda call: say("50") if call["turn"] == 0 else fail("overlong", "4097 tokens", 400)
        sample = self.sample(1)
        self.assertEqual((sample["num_turns"], sample["calls"]), (1, [self.peer.calls[0]["call_id"]]))
        self.peer.model = lambda call: fail("provider", "down", 503)
        terminal = self.play(1)
        sample = terminal["samples"][0]
        self.assertEqual((sample["ok"], sample["error"]["class"], sample["error"]["status"], sample["error"]["retryable"]), (False, "provider", 503, True))

    def test_errors_of_the_environment(self):
        self.load("prl-guess-v1", env_args={"fault": "raise"})
        error = self.play(1)["error"]
        self.assertEqual((error["type"], error["class"], error["retryable"]), ("EnvError", "task", False))
        self.assertIn("the environment is broken", error["message"])
        self.key += "reward"
        self.load("prl-guess-v1", env_args={"fault": "reward"})
        sample = self.sample(1)
        self.assertEqual((sample["ok"], sample["error"]["type"]), (False, "TaskError"))
        self.key += "nan"
        self.load("prl-guess-v1", env_args={"fault": "nan"})
        terminal = self.play(1)
        error = terminal.get("error") or terminal["samples"][0]["error"]
        self.assertEqual((terminal["t"], error["class"]), ("failed", "task"))
        self.assertIn("solved", error["message"])

    def test_cancellation_and_deadlines(self):
        self.load("prl-guess-v1")
        self.peer.model = lambda call: None
        self.assertEqual(self.play(1, deadline_s=0.3)["error"]["class"], "timeout")

        async def cancel():
            self.peer.calls.clear()
            running = self.peer.start_run(f"{self.key}-c", env_key=self.key, index=1)
            await self.peer.until(lambda: self.peer.calls, "a model call")
            self.peer.send({"t": "cancel", "run_id": f"{self.key}-c", "reason": "stale"})
            return await asyncio.wait_for(running, 30)

        self.assertEqual(self.go(cancel())["t"], "cancelled")
        self.assertEqual(self.go(self.peer.request("ping"))["calls_open"], 0)

    def test_many_at_once(self):
        self.load("prl-guess-v1")
        self.peer.model = lambda call: say("38")

        async def play():
            data = (await self.peer.request("tasks", env_key=self.key, split="train", offset=1, limit=1))["tasks"][0]["data"]
            return await asyncio.gather(*(self.peer.start_run(f"{self.key}-{i}", env_key=self.key, index=1, data=data) for i in range(64)))

        self.assertEqual({terminal["samples"][0]["reward"] for terminal in self.go(play())}, {1.25})

    def test_a_user_simulator_of_the_library(self):
        """Published: the library's own environment `user-sim` over a task set."""
        loaded = self.load("prl-judged-v1", env_config={"id": "user-sim"})
        self.assertEqual([seat["name"] for seat in loaded["seats"]], ["assistant", "user"])

        def model(call):
            if call["purpose"] == "judge":
                return say("yes")
            return say("###DONE###" if call["turn"] else "Twice one?") if call["seat"] == "user" else say("2")

        self.peer.model = model
        terminal = self.play(1)
        by_seat = {sample["seat"]: sample for sample in terminal["samples"]}
        self.assertEqual((by_seat["assistant"]["reward"], by_seat["assistant"]["metrics"]["user_turns"]), (1.0, 2.0))
        self.assertEqual((by_seat["user"]["trainable"], by_seat["user"]["num_turns"]), (False, 2))

    def test_best_of_n_of_the_library(self):
        """Published: the library's own environment `best-of-n` over a task set."""
        loaded = self.load("prl-reverse-text-v1", env_config={"id": "best-of-n"})
        self.assertGreaterEqual(len(loaded["seats"]), 1)
        terminal = self.play(1)
        self.assertEqual(terminal["t"], "result", terminal)
        self.assertGreater(len(terminal["samples"]), 1)
        self.assertTrue(all(sample["reward"] is not None for sample in terminal["samples"]))

    def test_records(self):
        self.load("prl-guess-v1")
        record = self.play(1, want={"record": True})["record"]
        self.assertEqual((record["env"]["id"], len(record["traces"]), record["ok"]), ("prl-guess-v1", 1, True))

    def test_arguments_are_checked(self):
        failed = self.load("prl-reverse-text-v1", env_args={"num_trian": 3}, expect="failed")
        self.assertEqual(failed["error"]["class"], "config")
        self.assertIn("no argument 'num_trian'; it has", failed["error"]["message"])
        failed = self.load("prl-reverse-text-v1", env_args={"num_train": "many"}, expect="failed")
        self.assertIn("num_train", failed["error"]["message"])
        failed = self.load("prl-reverse-text-v1", env_config={"agent": {"max_turn": 3}}, expect="failed")
        self.assertIn("max_turn", failed["error"]["message"])

    def test_a_legacy_environment_says_what_it_needs(self):
        failed = self.go(self.peer.load("prl-guess", "auto", env_key="legacy", paths=[str(ENVS), str(ENVS / "legacy")], expect="failed"))
        self.assertEqual(failed["error"]["class"], "config")
        self.assertIn("legacy API", failed["error"]["message"])
        self.assertIn("<=0.3.1", failed["error"]["message"])

    @unittest.skipUnless(os.environ.get("PRL_PUBLISHED_ENVS"), "PRL_PUBLISHED_ENVS is not the folder `environments` of the verifiers repository")
    def test_published_examples(self):
        """From a checkout: they are on no package index."""
        root = pathlib.Path(os.environ["PRL_PUBLISHED_ENVS"])

        def model(call):
            names = [tool["function"]["name"] for tool in call["tools"]]
            text = json.dumps(call["messages"])
            if "facts_lookup" in names:
                tools = [message for message in call["messages"] if message["role"] == "tool"]
                asked = call["messages"][-1]["content"].split('"')[1] if not tools else ""
                return say(f"<answer>{tools[-1]['content']}</answer>") if tools else say(None, tool_calls=[("facts_lookup", {"name": asked})])
            return say("[call]" if "[call]" in call["messages"][-1]["content"] or "call" in text.rsplit("legal", 1)[-1] else "[check]")

        self.peer.model = model
        for name in ("glossary", "kuhn_poker"):
            self.key += name
            self.go(self.peer.load(name, "auto", env_key=self.key, paths=[str(root / name)]))
            terminal = self.play(0)
            self.assertEqual(terminal["t"], "result", terminal)
            rewards = [sample["reward"] for sample in terminal["samples"]]
            self.assertEqual(rewards, [1.0]) if name == "glossary" else self.assertEqual(sum(rewards), 0.0)


if __name__ == "__main__":
    main("v1")
