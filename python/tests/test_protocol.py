"""The worker against the fake adapter: every message, every limit, every fault. Needs no package."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

from peer import HEADER, PYTHON_DIR, WAIT_S, Peer, WorkerGone, fail, say

sys.path.insert(0, str(PYTHON_DIR))
from prl_worker.catalogue import fingerprint, row_hash
from prl_worker.framing import FrameError, FrameReader, encode_frame, jsonable


HASTY = ("--patience", "0.1")  # of a worker whose periods of grace a test waits for


def backwards(call):
    """A model that solves the fake environment."""
    word = next(message["content"] for message in call["messages"] if message["role"] == "user").split()[-1]
    return say(word[::-1])


class Framing(unittest.TestCase):
    def test_frames_survive_any_cut(self):
        frames = encode_frame({"t": "a", "x": 1}, 1000) + encode_frame({"t": "b", "y": "ä€𝄞"}, 1000)
        for cut in range(len(frames)):
            reader = FrameReader()
            messages = reader.feed(frames[:cut]) + reader.feed(frames[cut:])
            self.assertEqual([message["t"] for message in messages], ["a", "b"])
            self.assertEqual(messages[1]["y"], "ä€𝄞")

    def test_length_counts_the_payload_alone(self):
        frame = encode_frame({"t": "a"}, 1000)
        self.assertEqual(HEADER.unpack_from(frame), (len(b'{"t":"a"}'), ord("J")))
        self.assertEqual(frame[HEADER.size :], b'{"t":"a"}')

    def test_what_json_cannot_hold(self):
        def payload(value):
            return json.loads(encode_frame({"t": "a", "v": value}, 1000)[HEADER.size :].decode("utf-8"))["v"]

        self.assertIsNone(payload(float("nan")))
        self.assertEqual(payload([float("inf"), 1.5]), [None, 1.5])
        self.assertEqual(payload("a\ud83d b"), "a\ufffd b")
        self.assertEqual(payload({1: {3, 2}}), {"1": [2, 3]})
        self.assertEqual(payload(object)[:6], "<class")
        for number in (2**80, -(2**63) - 1, 2**64, 10**4299):
            self.assertEqual(jsonable({"n": [number]}), {"n": [number]})
            self.assertIsInstance(jsonable(number), int)
            self.assertIn(str(number).encode(), encode_frame({"t": "a", "v": {1: number}}, 10_000))
        self.assertIsNone(jsonable(10**4400))
        self.assertIs(jsonable(True), True)

    def test_refuses_what_is_no_frame(self):
        for bad in (HEADER.pack(3, ord("M")) + b"abc", HEADER.pack(2**31, ord("J")), HEADER.pack(2, ord("J")) + b"[]", HEADER.pack(2, ord("J")) + b"{x"):
            with self.assertRaises(FrameError):
                FrameReader().feed(bad)

    def test_hashes_do_not_depend_on_the_order_of_keys(self):
        self.assertEqual(row_hash({"a": 1, "b": "ü"}), row_hash({"b": "ü", "a": 1}))
        self.assertNotEqual(row_hash({"a": 1}), row_hash({"a": 2}))
        self.assertNotEqual(fingerprint(3, [{"a": 1}]), fingerprint(4, [{"a": 1}]))


class Case(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        # A loop that is debugged keeps the stack of every future, and a test here has thousands.
        asyncio.get_running_loop().set_debug(False)

    async def peer(self, **options):
        peer = Peer(**options)
        await peer.start()
        self.addAsyncCleanup(peer.stop)
        return peer


class Hello(Case):
    async def test_says_who_it_is(self):
        peer = await self.peer()
        reply = await peer.hello(max_frame=100_000)
        self.assertEqual(reply["t"], "hello_ok")
        self.assertEqual(reply["protocol"], 1)
        self.assertEqual(reply["pid"], peer.process.pid)
        self.assertEqual(reply["max_frame"], 100_000)
        self.assertIn("fake", reply["adapters"])

    async def test_refuses_another_protocol(self):
        peer = await self.peer()
        reply = await peer.hello(protocol=2)
        self.assertEqual((reply["t"], reply["code"], reply["fatal"]), ("error", "protocol", True))
        self.assertIn("prl-env/1", reply["message"])
        self.assertEqual(await peer.exit_status(), 0)

    async def test_wants_hello_first(self):
        peer = await self.peer()
        peer.send({"t": "ping", "id": "x"})
        await peer.until(lambda: peer.errors, "an error")
        self.assertEqual(peer.errors[0]["code"], "protocol")
        self.assertEqual(await peer.exit_status(), 0)

    async def test_unknown_types_and_bad_requests_do_not_end_it(self):
        peer = await self.peer()
        await peer.load()
        peer.send({"t": "dance"})
        peer.send({"t": "run", "run_id": "r0", "env_key": "e", "session_id": "s"})
        peer.send({"t": "tasks", "id": "t0", "env_key": "e", "split": "train", "offset": "zero", "limit": 1})
        await peer.until(lambda: len(peer.errors) == 3, "three errors")
        self.assertEqual([error["code"] for error in peer.errors], ["unknown_type", "bad_request", "bad_request"])
        self.assertEqual(peer.errors[1]["run_id"], "r0")
        self.assertIn("run.task", peer.errors[1]["message"])
        self.assertIn("tasks.offset", peer.errors[2]["message"])
        self.assertEqual((await peer.request("ping", ts=3.5))["ts"], 3.5)

    async def test_broken_frames_end_it(self):
        for bad in (b"\xff" * 64, HEADER.pack(4, ord("J")) + b"{no}"):
            peer = await self.peer()
            await peer.hello()
            peer.writer.write(bad)
            await peer.until(lambda: peer.errors, "an error")
            self.assertEqual((peer.errors[0]["code"], peer.errors[0]["fatal"]), ("bad_frame", True))
            self.assertEqual(await peer.exit_status(), 0)

    async def test_token(self):
        peer = await self.peer(env={"PRL_ENV_TOKEN": "secret"})
        self.assertEqual((await peer.hello(token="other"))["code"], "token")
        peer = await self.peer(env={"PRL_ENV_TOKEN": "secret"})
        self.assertEqual((await peer.hello(token="secret"))["token"], "secret")
        reply = await peer.request("call", function="os:getenv", args=["PRL_ENV_TOKEN"])
        self.assertIsNone(reply["value"])


class Connecting(Case):
    def start_process(self, *arguments):
        process = subprocess.Popen(
            [sys.executable, "-m", "prl_worker", *arguments], env={**os.environ, "PYTHONPATH": str(PYTHON_DIR)}, stderr=subprocess.PIPE, text=True
        )
        self.addCleanup(process.stderr.close)
        self.addCleanup(process.kill)
        return process

    async def test_connects(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(WAIT_S)
            process = self.start_process("--connect", f"127.0.0.1:{listener.getsockname()[1]}")
            sock, _ = await asyncio.to_thread(listener.accept)
        peer = Peer()
        await peer.attach(sock)
        self.assertEqual((await peer.hello())["t"], "hello_ok")
        peer.writer.close()
        self.assertEqual(await asyncio.to_thread(process.wait, WAIT_S), 0)

    async def test_listens(self):
        process = self.start_process("--listen", "127.0.0.1:0")
        line = await asyncio.to_thread(process.stderr.readline)
        peer = Peer(model=backwards)
        await peer.attach(socket.create_connection(("127.0.0.1", int(line.rsplit(":", 1)[1]))))
        await peer.load()
        self.assertEqual((await peer.sample())["reward"], 1.0)
        peer.writer.close()
        self.assertEqual(await asyncio.to_thread(process.wait, WAIT_S), 0)

    async def test_wants_a_connection(self):
        process = self.start_process()
        self.assertEqual(await asyncio.to_thread(process.wait, WAIT_S), 2)
        self.assertIn("PRL_ENV_FD", process.stderr.read())


class Loading(Case):
    async def test_loaded(self):
        peer = await self.peer()
        loaded = await peer.load(env_args={"num_train": 7, "seats": ["agent", "_user"], "tools": True, "stateful": True})
        self.assertEqual(loaded["kind"], "fake")
        self.assertEqual(loaded["splits"]["train"]["num_tasks"], 7)
        self.assertEqual(loaded["seats"], [{"name": "agent", "trainable": True}, {"name": "_user", "trainable": False}])
        self.assertEqual(loaded["tools"][0]["function"]["name"], "lookup")
        self.assertTrue(loaded["is_stateful"])
        endless = await peer.load(env_key="endless", env_args={"num_train": -1})
        self.assertEqual((endless["splits"]["train"]["num_tasks"], endless["splits"]["train"]["infinite"]), (None, True))

    async def test_failures_say_why(self):
        peer = await self.peer()
        failed = await peer.load(env_args={"numtrain": 1}, expect="failed")
        self.assertEqual((failed["error"]["class"], failed["error"]["retryable"]), ("config", False))
        self.assertIn("'numtrain'", failed["error"]["message"])
        self.assertIn("num_train", failed["error"]["message"])
        failed = await peer.load(env_args={"load": "raise"}, expect="failed")
        self.assertEqual(failed["error"]["type"], "FakeFailure")
        self.assertIn("was told to fail", failed["error"]["traceback"])
        failed = await peer.load(kind="v2", expect="failed")
        self.assertIn("'v2'", failed["error"]["message"])
        await peer.load()
        failed = await peer.load(expect="failed")
        self.assertIn("loaded already", failed["error"]["message"])

    async def test_modules_that_are_none(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/empty_env.py", "w") as file:
                file.write("x = 1\n")
            with open(f"{folder}/broken_env.py", "w") as file:
                file.write("import no_such_package_anywhere\n")
            peer = await self.peer()
            for env_id, wanted in (
                ("no-such-env-anywhere", "no module 'no_such_env_anywhere'"),
                ("org/9 evil!", "names no Python module"),
                ("empty-env", "neither load_environment"),
                ("org/broken-env@1.0", "No module named 'no_such_package_anywhere'"),
            ):
                failed = await peer.load(env_id=env_id, kind="auto", paths=[folder], expect="failed")
                self.assertEqual(failed["error"]["class"], "config")
                self.assertIn(wanted, failed["error"]["message"])
            failed = await peer.load(env_id="x", kind="auto", paths=[folder + "/none"], expect="failed")
            self.assertIn("is no folder", failed["error"]["message"])

    async def test_pongs_come_while_it_loads(self):
        peer = await self.peer()
        await peer.hello()
        loading = asyncio.create_task(peer.load(env_args={"load": "slow:1.5"}))
        await asyncio.sleep(0.2)
        self.assertEqual((await peer.request("ping"))["t"], "pong")
        self.assertFalse(loading.done())
        self.assertGreaterEqual((await loading)["load_s"], 1.5)

    async def test_unload_ends_its_runs(self):
        peer = await self.peer(model=lambda call: None)
        await peer.load()
        running = peer.start_run("r1")
        await peer.until(lambda: peer.calls, "a model call")
        self.assertEqual((await peer.request("unload", env_key="e"))["t"], "unloaded")
        self.assertEqual((await running)["t"], "cancelled")
        failed = await peer.run("r2")
        self.assertEqual((failed["t"], failed["error"]["class"]), ("failed", "infra"))
        await peer.load()


class Tasks(Case):
    async def test_pages_cover_the_split_once(self):
        peer = await self.peer()
        loaded = await peer.load(env_args={"num_train": 25})
        rows, offset = [], 0
        for _ in range(10):
            page = await peer.request("tasks", env_key="e", split="train", offset=offset, limit=10)
            rows += page["tasks"]
            offset = page["next_offset"]
            if page["end"]:
                break
        self.assertTrue(page["end"], "more pages than there can be")
        self.assertEqual([row["index"] for row in rows], list(range(25)))
        self.assertEqual(len({row["id"] for row in rows}), 25)
        for row in rows:
            self.assertEqual(row["hash"], row_hash(row["data"]))
        self.assertEqual(loaded["splits"]["train"]["fingerprint"], fingerprint(25, [row["data"] for row in rows]))

    async def test_large_rows_make_short_pages(self):
        peer = await self.peer()
        await peer.load(env_args={"num_train": 10, "row_bytes": 1_500_000})
        page = await peer.request("tasks", env_key="e", split="train", offset=0, limit=10)
        self.assertEqual((len(page["tasks"]), page["next_offset"], page["end"]), (2, 2, False))

    async def test_without_data_and_out_of_range(self):
        peer = await self.peer()
        await peer.load(env_args={"num_train": 3})
        page = await peer.request("tasks", env_key="e", split="train", offset=0, limit=10, with_data=False)
        self.assertNotIn("data", page["tasks"][0])
        page = await peer.request("tasks", env_key="e", split="train", offset=50, limit=10)
        self.assertEqual((page["tasks"], page["end"]), ([], True))
        self.assertEqual((await peer.request("tasks", env_key="e", split="test", offset=0, limit=1))["t"], "failed")
        self.assertEqual((await peer.request("tasks", env_key="none", split="train", offset=0, limit=1))["t"], "failed")

    async def test_fingerprints_tell_workers_apart(self):
        prints = []
        for shuffle in (False, False, True, True):
            peer = await self.peer()
            loaded = await peer.load(env_args={"shuffle_rows": shuffle})
            prints.append(loaded["splits"]["train"]["fingerprint"])
        self.assertEqual(prints[0], prints[1])
        self.assertEqual(len(set(prints)), 3)


class Rollouts(Case):
    async def test_one_turn(self):
        peer = await self.peer(model=backwards)
        await peer.load()
        page = await peer.request("tasks", env_key="e", split="train", offset=4, limit=1)
        row = page["tasks"][0]
        result = await peer.result(index=4, data=row["data"], sampling={"temperature": 0.5, "max_tokens": 9}, columns=["word"], want={"record": True})
        sample = result["samples"][0]
        self.assertEqual((sample["reward"], sample["ok"], sample["num_turns"]), (1.0, True, 1))
        self.assertEqual(sample["columns"], {"word": row["data"]["word"]})
        self.assertEqual(sample["prompt"], row["prompt"])
        self.assertEqual(sample["completion"], [{"role": "assistant", "content": row["answer"]}])
        self.assertEqual(sample["usage"], {"input_tokens": 10, "output_tokens": 5, "cached_tokens": 0})
        self.assertEqual(result["record"]["row"], row["data"])
        call = peer.calls[0]
        self.assertEqual(sample["calls"], [call["call_id"]])
        self.assertEqual((call["run_id"], call["session_id"], call["turn"], call["purpose"], call["trainable"]), ("r1", "s-r1", 0, "policy", True))
        self.assertEqual((call["model"], call["sampling"]), ("policy", {"temperature": 0.5, "max_tokens": 9}))
        self.assertEqual(call["messages"], row["prompt"])

    async def test_turns_seats_and_parallel_calls(self):
        peer = await self.peer(model=backwards)
        await peer.load(env_args={"turns": 2, "seats": ["agent", "_user"], "parallel": 3})
        samples = (await peer.result())["samples"]
        self.assertEqual([(s["seat"], s["session_id"], s["trainable"], s["num_turns"]) for s in samples], [("agent", "s-r1", True, 2), ("_user", "s-r1/1", False, 2)])
        policy = [call for call in peer.calls if call["purpose"] == "policy"]
        self.assertEqual([(call["session_id"], call["turn"], call["trainable"]) for call in policy], [("s-r1", 0, True), ("s-r1", 1, True), ("s-r1/1", 0, False), ("s-r1/1", 1, False)])
        self.assertEqual(sum(call["purpose"] == "side" for call in peer.calls), 8)
        self.assertEqual(len({call["call_id"] for call in peer.calls}), 12)
        self.assertEqual(policy[1]["messages"][:3], policy[0]["messages"] + [samples[0]["completion"][0]])

    async def test_errors_of_the_model(self):
        peer = await self.peer(model=lambda call: fail("overlong", "too long", 400))
        await peer.load()
        sample = await peer.sample("r1")
        self.assertEqual((sample["stop_condition"], sample["is_truncated"], sample["ok"]), ("prompt_too_long", True, True))
        peer.model = lambda call: fail("provider", "down", 503)
        sample = await peer.sample("r2")
        self.assertFalse(sample["ok"])
        self.assertEqual((sample["error"]["class"], sample["error"]["status"], sample["error"]["retryable"], sample["reward"]), ("provider", 503, True, None))
        peer.model = lambda call: fail("auth", "no key", 401)
        self.assertFalse((await peer.sample("r3"))["error"]["retryable"])
        peer.model = lambda call: {"finish_reason": "stop"}
        self.assertEqual((await peer.sample("r4"))["error"]["class"], "provider")

    async def test_judges(self):
        peer = await self.peer(model=lambda call: say("yes" if call["purpose"] == "judge" else "x"))
        await peer.load(env_args={"judge": True})
        self.assertEqual((await peer.sample())["reward"], 1.0)
        self.assertEqual(peer.calls[1]["model"], "fake-judge")
        self.assertFalse(peer.calls[1]["trainable"])

    async def test_too_many_runs(self):
        peer = await self.peer(model=lambda call: None, hello={"max_inflight": 2})
        await peer.load()
        for run_id in ("r1", "r2"):
            peer.start_run(run_id)
        refused = await peer.run("r3")
        self.assertEqual((refused["error"]["class"], refused["error"]["retryable"]), ("infra", True))
        peer.start_run("r1")
        await peer.until(lambda: peer.errors, "an error")
        self.assertIn("running already", peer.errors[0]["message"])

    async def test_a_thousand_at_once(self):
        peer = await self.peer(model=backwards)
        await peer.load(env_args={"num_train": 1000, "latency_s": 0.05})
        results = await asyncio.gather(*(peer.start_run(f"r{i}", index=i) for i in range(1000)))
        self.assertEqual({result["t"] for result in results}, {"result"})
        self.assertEqual([result["samples"][0]["reward"] for result in results], [1.0] * 1000)
        self.assertEqual(set(peer.num_terminals.values()), {1})
        pong = await peer.request("ping")
        self.assertEqual((pong["done"], pong["inflight"], pong["calls_open"]), (1000, 0, 0))


class Groups(Case):
    async def test_scored_together(self):
        peer = await self.peer(model=backwards)
        loaded = await peer.load(env_args={"group": True})
        self.assertTrue(loaded["group_scoring"] and loaded["provides_advantages"])
        good = await peer.result("a", index=0, hold=True, group_id="g")
        peer.model = lambda call: say("")
        bad = await peer.result("b", index=0, hold=True, group_id="g")
        self.assertEqual((good["samples"][0]["reward"], bad["samples"][0]["reward"]), (1.0, 0.0))
        self.assertEqual((await peer.request("ping"))["held"], 2)
        scored = await peer.request("score_group", env_key="e", group_id="g", members=[{"run_id": "a"}, {"run_id": "x", "sample": None, "failed": True}, {"run_id": "b"}])
        self.assertEqual([entry and entry["reward"] for entry in scored["samples"]], [0.5, None, -0.5])
        self.assertEqual((await peer.request("ping"))["held"], 0)

    async def test_members_of_another_worker(self):
        peer = await self.peer(model=backwards)
        await peer.load(env_args={"group": True})
        sample = (await peer.result("a", hold=True, group_id="g"))["samples"][0]
        members = [{"run_id": "a"}, {"run_id": "elsewhere", "sample": {**sample, "reward": 0.0}}]
        scored = await peer.request("score_group", env_key="e", group_id="g", members=members)
        self.assertEqual([entry["reward"] for entry in scored["samples"]], [0.5, -0.5])
        failed = await peer.request("score_group", env_key="e", group_id="g", members=[{"run_id": "elsewhere"}])
        self.assertEqual((failed["t"], failed["error"]["class"]), ("failed", "infra"))

    async def test_release(self):
        peer = await self.peer(model=backwards)
        await peer.load(env_args={"group": True})
        for run_id in ("a", "b", "c"):
            await peer.result(run_id, hold=True, group_id="g" if run_id != "c" else "h")
        peer.send({"t": "release", "env_key": "e", "group_id": "g"})
        self.assertEqual((await peer.request("ping"))["held"], 1)
        peer.send({"t": "release", "env_key": "e", "run_ids": ["c", "no such"]})
        self.assertEqual((await peer.request("ping"))["held"], 0)

    async def test_must_hold(self):
        peer = await self.peer(model=backwards)
        await peer.load(env_args={"group": True})
        self.assertEqual((await peer.run())["error"]["class"], "config")


class Ending(Case):
    async def test_cancel(self):
        peer = await self.peer(model=lambda call: None)
        await peer.load()
        running = peer.start_run("r1")
        await peer.until(lambda: peer.calls, "a model call")
        peer.send({"t": "cancel", "run_id": "r1", "reason": "stale"})
        peer.send({"t": "cancel", "run_id": "r1", "reason": "again"})
        peer.send({"t": "cancel", "run_id": "nobody"})
        terminal = await running
        self.assertEqual((terminal["t"], terminal["reason"]), ("cancelled", "stale"))
        self.assertEqual(peer.cancelled_calls, [peer.calls[0]["call_id"]])
        peer.send({"t": "model_reply", "call_id": peer.calls[0]["call_id"], **say("late")})
        pong = await peer.request("ping")
        self.assertEqual((pong["cancelled"], pong["calls_open"], peer.num_terminals["r1"]), (1, 0, 1))

    async def test_cancel_in_a_burst_of_starts(self):
        peer = await self.peer(model=lambda call: None)
        await peer.load(env_args={"num_train": 1000})
        runs = [peer.start_run(f"r{i}", index=i) for i in range(500)]
        for i in range(500):
            peer.send({"t": "cancel", "run_id": f"r{i}", "reason": "all"})
        self.assertEqual({terminal["t"] for terminal in await asyncio.wait_for(asyncio.gather(*runs), WAIT_S)}, {"cancelled"})
        self.assertEqual(set(peer.num_terminals.values()), {1})
        self.assertEqual((await peer.request("ping"))["inflight"], 0)

    async def test_deadline(self):
        peer = await self.peer(model=lambda call: None)
        await peer.load()
        terminal = await peer.run(deadline_s=0.2)
        self.assertEqual((terminal["t"], terminal["error"]["class"], terminal["error"]["retryable"]), ("failed", "timeout", True))
        await peer.until(lambda: peer.cancelled_calls, "model_cancel")

    async def test_a_rollout_that_ignores_its_end(self):
        peer = await self.peer(arguments=HASTY)
        await peer.load()
        running = peer.start_run("r1", data={"word": "a", "answer": "a", "misbehave": "ignore_cancel"})
        await asyncio.sleep(0.1)
        peer.send({"t": "cancel", "run_id": "r1", "reason": "x"})
        self.assertEqual((await asyncio.wait_for(running, WAIT_S))["t"], "cancelled")
        self.assertEqual((await peer.sample("r2"))["ok"], True)

    async def test_cleanup_is_awaited(self):
        peer = await self.peer()
        await peer.load()
        running = peer.start_run("r1", data={"word": "a", "answer": "a", "misbehave": "slow_cancel:0.5"})
        await asyncio.sleep(0.1)
        peer.send({"t": "cancel", "run_id": "r1", "reason": "x"})
        self.assertEqual((await peer.request("ping"))["inflight"], 1)
        self.assertEqual((await asyncio.wait_for(running, WAIT_S))["t"], "cancelled")

    async def test_shutdown_waits_for_runs_and_then_does_not(self):
        answers = []
        peer = await self.peer(model=lambda call: answers.append(call))
        await peer.load()
        first, second = peer.start_run("r1"), peer.start_run("r2")
        await peer.until(lambda: len(answers) == 2, "two calls")
        peer.send({"t": "shutdown", "grace_s": 0.3})
        peer.send({"t": "model_reply", "call_id": answers[0]["call_id"], **say("x")})
        self.assertEqual((await first)["t"], "result")
        self.assertEqual((await second)["t"], "cancelled")
        self.assertEqual(await peer.exit_status(), 0)

    async def test_sigterm(self):
        peer = await self.peer(model=lambda call: None)
        await peer.load()
        running = peer.start_run("r1")
        await peer.until(lambda: peer.calls, "a model call")
        peer.process.send_signal(signal.SIGINT)
        peer.process.send_signal(signal.SIGTERM)
        self.assertEqual((await running)["t"], "cancelled")
        self.assertEqual(await peer.exit_status(), 0)

    async def test_ends_with_its_peer_even_when_blocked(self):
        for what in ("hang", "block:600"):
            peer = await self.peer(arguments=HASTY)
            await peer.load()
            peer.start_run("r1", data={"word": "a", "answer": "a", "misbehave": what})
            await peer.until(lambda: any("misbehaves" in record["msg"] for record in peer.logs), "the rollout")
            peer.writer.close()
            self.assertIn(await peer.exit_status(), (0, 1))


class Faults(Case):
    async def misbehave(self, what, *, model=backwards, **options):
        peer = await self.peer(model=model, **options)
        await peer.load()
        return peer, await peer.run(data={"word": "ab", "answer": "ba", "misbehave": what})

    async def test_exceptions(self):
        peer, terminal = await self.misbehave("raise_chain")
        error = terminal["error"]
        self.assertEqual((error["type"], error["class"], error["retryable"]), ("FakeFailure", "task", False))
        self.assertEqual(error["chain"], ["FakeFailure: told to fail with a cause", "KeyError: 'missing'"])
        self.assertIn("_do_raise_chain", error["traceback"])
        for place, what in enumerate(("exit", "self_cancel", "nan", "no_such_thing")):
            terminal = await peer.run(f"x{place}", data={"word": "ab", "answer": "ba", "misbehave": what})
            self.assertEqual(terminal["t"], "failed", what)
            self.assertIn(terminal["error"]["class"], ("task", "config"))
        self.assertEqual((await peer.sample("good"))["reward"], 1.0)

    async def test_output_stays_apart(self):
        peer, terminal = await self.misbehave("stdout:200000")
        self.assertEqual(terminal["t"], "result")
        await peer.stop()
        self.assertIn("xxxx", peer.stderr_text())
        self.assertIn("straight to descriptor 1", peer.stderr_text())

    async def test_dies(self):
        for what, status in (("die", 3), ("kill", -signal.SIGKILL)):
            peer = await self.peer()
            await peer.load()
            with self.assertRaises(WorkerGone):
                await peer.run(data={"word": "a", "answer": "a", "misbehave": what})
            self.assertEqual(await peer.exit_status(), status)

    async def test_huge_results(self):
        peer, terminal = await self.misbehave("huge:10000000")
        self.assertEqual(len(terminal["samples"][0]["info"]["padding"]), 10_000_000)
        peer, terminal = await self.misbehave("huge:300000", hello={"max_frame": 65536})
        self.assertEqual((terminal["t"], terminal["error"]["class"]), ("failed", "task"))
        self.assertIn("max_frame 65536", terminal["error"]["message"])
        terminal = await peer.run("r2", data={"word": "ab", "answer": "ba", "misbehave": "huge_call:300000"})
        self.assertEqual((terminal["t"], terminal["error"]["class"]), ("failed", "task"))
        self.assertEqual((await peer.sample("r3"))["reward"], 1.0)

    async def test_text_that_is_no_utf8(self):
        _, terminal = await self.misbehave("surrogate")
        self.assertEqual(terminal["samples"][0]["info"]["text"], "half a pair \ufffd here")

    async def test_broken_frames_reach_the_peer(self):
        for what in ("garbage", "oversize"):
            with self.assertRaises(WorkerGone):
                await self.misbehave(what)
        peer, terminal = await self.misbehave("unknown_type")
        self.assertEqual(peer.unexpected[0]["t"], "surprise")

    async def test_forgotten_calls_are_taken_back(self):
        peer, terminal = await self.misbehave("forgotten_call", model=lambda call: None if call["purpose"] == "side" else backwards(call))
        self.assertEqual(terminal["t"], "result")
        await peer.until(lambda: peer.cancelled_calls, "model_cancel")
        self.assertEqual((await peer.request("ping"))["calls_open"], 0)

    async def test_a_blocked_loop_is_seen(self):
        peer = await self.peer(model=backwards)
        await peer.load()
        await peer.request("ping")
        await peer.result(data={"word": "ab", "answer": "ba", "misbehave": "block:1.0"})
        pong = await peer.request("ping")
        self.assertGreater(pong["loop_lag_ms"], 800)
        self.assertGreater(pong["rss_mb"], 5)
        self.assertGreater(pong["open_files"], 3)

    async def test_a_long_block_writes_its_stack(self):
        peer = await self.peer(model=backwards, arguments=HASTY)
        await peer.load()
        await peer.result(data={"word": "ab", "answer": "ba", "misbehave": "block:1.5"})
        await peer.stop()
        self.assertIn("the event loop is blocked", peer.stderr_text())
        self.assertIn("_do_block", peer.stderr_text())

    async def test_logs(self):
        peer, _ = await self.misbehave("log:1000")
        records = [record for record in peer.logs if record["logger"] == "prl_worker.fake"]
        self.assertEqual(records[0]["msg"], "record 0")
        self.assertEqual(records[0]["run_id"], "r1")
        self.assertLessEqual(len(records), 400)

    async def test_once_in_all_processes(self):
        with tempfile.TemporaryDirectory() as folder:
            arguments = {"misbehave": {"all": "die"}, "marker": f"{folder}/marker"}
            peer = await self.peer()
            await peer.load(env_args=arguments)
            with self.assertRaises(WorkerGone):
                await peer.run()
            peer = await self.peer(model=backwards)
            await peer.load(env_args=arguments)
            self.assertEqual((await peer.sample())["reward"], 1.0)


class Functions(Case):
    async def test_call(self):
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/my_functions.py", "w") as file:
                file.write(
                    "import asyncio, time\n"
                    "def mean(rewards, scale=1):\n    return [scale * (r - sum(rewards) / len(rewards)) for r in rewards]\n"
                    "async def later(x):\n    await asyncio.sleep(0.01)\n    return {'x': x}\n"
                    "def slow():\n    time.sleep(30)\n"
                    "class Filter:\n    @staticmethod\n    def keep(x):\n        return x > 1\n"
                )
            peer = await self.peer()
            await peer.hello()
            reply = await peer.request("call", function="my_functions:mean", paths=[folder], args=[[1.0, 2.0, 3.0]], kwargs={"scale": 2})
            self.assertEqual(reply["value"], [-2.0, 0.0, 2.0])
            self.assertEqual((await peer.request("call", function="my_functions:later", args=[7]))["value"], {"x": 7})
            self.assertIs((await peer.request("call", function="my_functions:Filter.keep", args=[2]))["value"], True)
            slow = await peer.request("call", function="my_functions:slow", deadline_s=0.2)
            self.assertEqual(slow["error"]["class"], "timeout")
            wrong = await peer.request("call", function="my_functions:mean", args=[])
            self.assertEqual((wrong["error"]["type"], wrong["error"]["class"]), ("TypeError", "task"))
            for function in ("my_functions", "my_functions:nothing", "no_such_module_here:x", "my_functions:time"):
                self.assertEqual((await peer.request("call", function=function))["error"]["class"], "config")

    async def test_state(self):
        peer = await self.peer(model=backwards)
        await peer.load(env_args={"stateful": True}, state={"done": 5})
        await peer.result()
        reply = await peer.request("state", env_key="e")
        self.assertEqual(reply["state"], {"done": 6})
        self.assertEqual(set(reply["fingerprints"]), {"train", "eval"})


if __name__ == "__main__":
    unittest.main()
