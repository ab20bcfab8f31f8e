"""The worker with verifiers 0.3.1: environments of the legacy API."""

import asyncio
import difflib
import json
import pathlib
import re

from peer import ROOT, fail, say
from real import ENVS, SharedWorker, main

NATIVE_ROWS = pathlib.Path(__file__).parent / "reverse_text_rows.json"


class Legacy(SharedWorker):
    kind = "legacy"

    def test_reverse_text_equals_the_native_one(self):
        loaded = self.load("org/prl-reverse-text@1.0", env_args={"num_train": 50, "num_eval": 20})
        self.assertEqual((loaded["kind"], loaded["splits"]["train"]["num_tasks"], loaded["splits"]["eval"]["num_tasks"]), ("legacy", 50, 20))
        self.assertEqual((loaded["reward_names"], loaded["metric_names"]), (["lcs_reward_func"], ["num_turns"]))
        native = json.loads(NATIVE_ROWS.read_text())
        for split in ("train", "eval"):
            rows = self.page(split)
            self.assertEqual([(row["prompt"][-1]["content"], row["answer"]) for row in rows[: len(native[split])]], [tuple(row) for row in native[split]])
            self.assertEqual(rows[0]["prompt"][0]["role"], "system")
        row = self.page()[3]
        for said, tagged in ((row["answer"], True), (row["answer"][:-3], True), ("", True), (row["answer"], False)):
            self.peer.model = lambda call: say(f"<reversed_text> {said} </reversed_text>" if tagged else said)
            expected = difflib.SequenceMatcher(None, said.strip() if tagged else "", row["answer"]).ratio()
            sample = self.sample(3)
            self.assertEqual(sample["reward"], expected)
            self.assertEqual(sample["rewards"], {"lcs_reward_func": {"score": expected, "weight": 1.0}})
        self.assertEqual(self.peer.calls[0]["messages"], row["prompt"])

    def test_several_turns(self):
        self.load("prl-guess")
        guesses = iter(["50", "25", "38"])
        self.peer.model = lambda call: say(next(guesses))
        sample = self.sample(1)
        self.assertEqual((sample["reward"], sample["num_turns"], sample["stop_condition"]), (1.0 + 0.25 / 3, 3, "has_final_env_response"))
        self.assertEqual([message["content"] for message in sample["completion"]], ["50", "Lower.", "25", "Higher.", "38", "Right."])
        self.assertEqual(sample["calls"], [call["call_id"] for call in self.peer.calls])
        for earlier, later in zip(self.peer.calls, self.peer.calls[1:]):
            self.assertEqual(later["messages"][: len(earlier["messages"])], earlier["messages"])
        self.assertEqual([call["turn"] for call in self.peer.calls], [0, 1, 2])
        self.assertEqual(sample["metrics"]["num_turns"], 3.0)
        self.assertGreaterEqual(sample["timing"]["total_s"], sample["timing"]["model_s"])

    def test_brief_results(self):
        self.load("prl-guess")

        def guesses():
            said = iter(["50", "25", "38"])
            return lambda call: say(next(said))

        self.assertEqual([message["content"] for message in self.check_brief(1, guesses)["completion"]], ["Right."])
        # What the environment makes of no content is for it to tell.
        self.key += "tools"
        self.load("prl-calculator")
        replies = iter([say(None, tool_calls=[("add", {"a": 1, "b": 4})]), say("It is 5.")])
        self.peer.model = lambda call: next(replies)
        self.assertEqual(len(self.sample(1, want={"brief": True})["prompt"]), len(self.peer.calls[0]["messages"]))

    def test_limits(self):
        loaded = self.load("prl-guess", limits={"max_turns": 2, "num_train": 7, "max_total_completion_tokens": 1000})
        self.assertEqual((loaded["splits"]["train"]["num_tasks"], loaded["warnings"]), (7, []))
        sample = self.sample(1)
        self.assertEqual((sample["num_turns"], sample["stop_condition"]), (2, "max_turns_reached"))

    def test_tools(self):
        loaded = self.load("prl-calculator")
        self.assertEqual([tool["function"]["name"] for tool in loaded["tools"]], ["add", "multiply"])
        replies = [say(None, tool_calls=[("add", {"a": 1, "b": 4}), ("multiply", {"a": 2, "b": 3})]), say("It is 5.")]
        self.peer.model = lambda call: replies[call["turn"]]
        sample = self.sample(1)
        self.assertEqual((sample["reward"], sample["metrics"]["total_tool_calls"]), (1.0, 2.0))
        self.assertEqual([message.get("content") for message in sample["completion"]], [None, "5", "6", "It is 5."])
        self.assertEqual(sample["completion"][0]["tool_calls"], replies[0]["message"]["tool_calls"])
        self.assertEqual(self.peer.calls[1]["messages"][1]["tool_calls"], replies[0]["message"]["tool_calls"])
        self.assertEqual([message.get("tool_call_id") for message in self.peer.calls[1]["messages"][2:]], ["call_0", "call_1"])
        self.assertEqual(self.peer.calls[0]["tools"], loaded["tools"])

    def test_broken_tool_calls_go_back_to_the_model(self):
        self.load("prl-calculator")
        replies = [say(None, tool_calls=[("add", '{"a": 1'), ("add", {"a": 1}), ("nothing", {})]), say("5")]
        self.peer.model = lambda call: replies[call["turn"]]
        sample = self.sample(1)
        self.assertTrue(sample["ok"], sample["error"])
        self.assertEqual([message["role"] for message in sample["completion"]], ["assistant", "tool", "tool", "tool", "assistant"])

    def test_tools_with_state(self):
        self.load("prl-counter")
        replies = [say(None, tool_calls=[("count", {"step": 2})]), say(None, tool_calls=[("count", {"step": 1})]), say("done")]
        self.peer.model = lambda call: replies[call["turn"]]
        sample = self.sample(1, columns=["counter", "no_such_column"])
        self.assertEqual((sample["reward"], sample["columns"]), (1.0, {"counter": [3], "no_such_column": None}))
        self.assertNotIn("counter", self.peer.calls[0]["tools"][0]["function"]["parameters"]["properties"])

    def test_judges_call_back(self):
        self.load("prl-judged")
        self.peer.model = lambda call: say("yes" if call["purpose"] == "judge" else "2")
        self.assertEqual(self.sample(1)["reward"], 1.0)
        judge = self.peer.calls[1]
        self.assertEqual((judge["model"], judge["trainable"], judge["sampling"]), ("a-judge", False, {"temperature": 0.0, "max_tokens": 4}))
        self.assertIn("Response:", judge["messages"][0]["content"])
        self.peer.model = lambda call: fail("refused", "judges are not allowed", 403) if call["purpose"] == "judge" else say("2")
        sample = self.sample(1)
        self.assertEqual(sample["reward"], 0.0)
        self.assertIn("judges are not allowed", sample["warnings"][0])

    def test_an_environment_that_asks_the_policy_itself(self):
        self.load("prl-judged", env_args={"own_judge": True})
        self.peer.model = lambda call: say("yes" if call["purpose"] == "side" else "2")
        sample = self.sample(1, sampling={"temperature": 0.7})
        self.assertEqual((sample["reward"], len(sample["calls"])), (1.0, 1))
        side = self.peer.calls[1]
        self.assertEqual((side["purpose"], side["model"], side["trainable"], side["sampling"]), ("side", "policy", False, {"temperature": 0.0, "max_tokens": 4}))

    def test_group_scores(self):
        loaded = self.load("prl-ranked")
        self.assertTrue(loaded["group_scoring"])
        self.assertEqual(self.play(0)["error"]["class"], "config")
        run_ids = [f"{self.key}-{place}" for place in range(3)]
        samples = []
        for run_id, text in zip(run_ids, ("a" * 200, "bb", "c")):
            self.peer.model = lambda call: say(text)
            result = self.go(self.peer.result(run_id, env_key=self.key, index=0, hold=True, group_id="g"))
            self.assertEqual((result["held"], result["samples"][0]["reward"]), (True, None))
            samples += result["samples"]
        members = [{"run_id": run_id} for run_id in run_ids]
        scored = self.go(self.peer.request("score_group", env_key=self.key, group_id="g", members=members))
        self.assertEqual([entry["reward"] for entry in scored["samples"]], [-0.5, 0.5, 1.0])
        self.assertEqual(scored["samples"][1]["rewards"]["brevity_rank"], {"score": 0.5, "weight": 1.0})
        # The same from the samples alone, as after a restart, with one that failed.
        members = [{"run_id": run_id, "sample": sample} for run_id, sample in zip(run_ids, samples)] + [{"run_id": "x", "failed": True}]
        again = self.go(self.peer.request("score_group", env_key=self.key, group_id="g", members=members))
        self.assertEqual(again["samples"], scored["samples"] + [None])

    def test_group_functions_that_fail_are_told(self):
        self.load("prl-ranked", env_args={"fault": "raise"})
        run_id = f"{self.key}-a"
        self.go(self.peer.result(run_id, env_key=self.key, hold=True, group_id="g"))
        scored = self.go(self.peer.request("score_group", env_key=self.key, group_id="g", members=[{"run_id": run_id}]))
        self.assertIn("the group cannot be ranked", scored["samples"][0]["warnings"][0])

    def test_errors_of_the_model(self):
        self.load("prl-guess")
        self.peer.model = lambda call: say("50") if call["turn"] == 0 else fail("overlong", "4097 tokens", 400)
        sample = self.sample(1)
        self.assertEqual((sample["stop_condition"], sample["is_truncated"], sample["ok"], sample["num_turns"]), ("prompt_too_long", True, True, 1))
        self.peer.model = lambda call: fail("provider", "down", 503)
        sample = self.sample(1)
        self.assertEqual((sample["ok"], sample["error"]["class"], sample["error"]["status"], sample["error"]["retryable"]), (False, "provider", 503, True))
        self.peer.model = lambda call: say(None)
        sample = self.sample(1)
        self.assertEqual((sample["ok"], sample["num_turns"]), (True, 5))

    def test_errors_of_the_environment(self):
        self.load("prl-guess", env_args={"fault": "raise"})
        error = self.play(1)["error"]
        self.assertEqual((error["type"], error["class"]), ("KeyError", "task"))
        self.assertIn("prl_guess.py", error["traceback"])
        self.key += "tool"
        self.load("prl-guess", env_args={"fault": "tool"})
        sample = self.sample(1)
        self.assertEqual((sample["ok"], sample["error"]["type"], sample["error"]["class"], sample["stop_condition"]), (False, "ToolError", "tool", "has_error"))
        self.key += "reward"
        self.load("prl-guess", env_args={"fault": "reward"})
        sample = self.sample(1)
        self.assertEqual(sample["metrics"]["solved"], 0.0)
        self.assertIn("solved: the reward is broken (ZeroDivisionError at", sample["warnings"][0])
        self.key += "nan"
        self.load("prl-guess", env_args={"fault": "nan"})
        error = self.play(1)["error"]
        self.assertEqual((error["class"], error["retryable"]), ("task", False))
        self.assertIn("solved = nan", error["message"])

    def test_time_limits_and_cancellation(self):
        self.load("prl-guess", env_args={"seconds": 30.0})
        self.assertEqual(self.play(1, deadline_s=0.3)["error"]["class"], "timeout")
        self.key += "own"
        self.load("prl-guess", env_args={"seconds": 30.0, "timeout_seconds": 0.3})
        sample = self.sample(1)
        self.assertEqual((sample["stop_condition"], sample["ok"], sample["num_turns"]), ("timeout_reached", True, 1))

        async def cancel():
            running = self.peer.start_run(f"{self.key}-c", env_key=self.key.removesuffix("own"), index=1)
            self.peer.send({"t": "cancel", "run_id": f"{self.key}-c", "reason": "stale"})
            return await asyncio.wait_for(running, 30)

        self.assertEqual(self.go(cancel())["t"], "cancelled")

    def test_sampling(self):
        self.load("prl-guess", env_args={"sampling_args": {"temperature": 0.3, "top_p": 0.9, "extra_body": {"top_k": 5, "min_p": 0.1}}})
        self.sample(1, sampling={"temperature": 1.0, "max_tokens": 7, "top_k": -1})
        self.assertEqual(self.peer.calls[0]["sampling"], {"temperature": 1.0, "top_p": 0.9, "max_tokens": 7, "top_k": -1, "min_p": 0.1})

    def test_records(self):
        self.load("prl-guess")
        record = self.play(1, want={"record": True, "messages": False})
        self.assertNotIn("completion", record["samples"][0])
        self.assertEqual(record["record"]["example_id"], 1)
        self.assertEqual(record["record"]["metrics"]["num_turns"], 5.0)

    def test_arguments_are_checked(self):
        for env_id, arguments, wanted in (
            ("prl-reverse-text", {"num_trian": 3}, "no argument 'num_trian'; it has"),
            ("prl-guess", {"max_turn": 3}, "no argument 'max_turn'"),
            ("prl-guess", {"system_prompt": "Play."}, None),
        ):
            loaded = self.load(env_id, env_args=arguments, expect="loaded" if wanted is None else "failed")
            if wanted is not None:
                self.assertEqual(loaded["error"]["class"], "config")
                self.assertIn(wanted, loaded["error"]["message"])

    def test_extra_settings(self):
        self.load("prl-guess", extra_env_kwargs={"max_turns": 2, "max_seq_len": 99})
        self.peer.model = lambda call: say("0")
        self.assertEqual(self.sample(1)["num_turns"], 2)
        self.key += "unknown"
        failed = self.load("prl-guess", extra_env_kwargs={"no_such_thing": 1}, expect="failed")
        self.assertIn("has no no_such_thing", failed["error"]["message"])

    def test_a_v1_environment_says_what_it_needs(self):
        failed = self.go(self.peer.load("prl-reverse-text-v1", "auto", env_key="v1", paths=[str(ENVS), str(ENVS / "v1")], expect="failed"))
        self.assertEqual(failed["error"]["class"], "config")
        self.assertIn("v1 API", failed["error"]["message"])
        self.assertIn("verifiers>=0.4", failed["error"]["message"])

    def test_reasoning_gym(self):
        """A published environment: the library's own, over the reasoning-gym package."""
        loaded = self.load("prl-reasoning-gym", env_args={"gym": "count_bits", "num_train_examples": 5, "num_eval_examples": 4})
        self.assertEqual([loaded["splits"][split]["num_tasks"] for split in ("train", "eval")], [5, 4])
        number = int(re.findall(r"\d+", self.page()[0]["prompt"][-1]["content"])[-1])
        self.peer.model = lambda call: say(f"<answer>{number.bit_count()}</answer>")
        self.assertEqual(self.sample(0)["reward"], 1.0)
        self.peer.model = lambda call: say("<answer>none</answer>")
        self.assertLess(self.sample(0)["reward"], 1.0)

    def test_verdicts_of_math_verify(self):
        """What math.env asks with verify = "math-verify" is what the committed verdicts were made with."""
        rows = json.loads((ROOT / "src/env/testdata/math_verify.json").read_text())[::40]

        async def ask():
            requests = [
                self.peer.request("call", function="prl_worker.math_verdict:verify", args=[given, wanted], kwargs={"max_workers": 2})
                for _, wanted, given, _ in rows
            ]
            return [reply.get("value") for reply in await asyncio.gather(*requests)]

        self.assertEqual(self.go(ask()), [verdict for *_, verdict in rows])
        # A worker may be killed at any time, and with it the tracker that removes the semaphores of process pools from /dev/shm.
        pid = self.peer.process.pid
        children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        commands = [pathlib.Path(f"/proc/{child}/cmdline").read_text() for child in children]
        self.assertEqual([command for command in commands if "resource_tracker" in command], [])


if __name__ == "__main__":
    main("legacy")
