#!/usr/bin/env python3
"""Training modes opd and sft: a student learns from a teacher behind an inference server of its own."""
import contextlib
import json
import shutil

import chat_server
import harness
from harness import check, prl

ENV = json.dumps([{"id": "reverse-text", "args": harness.ENV_ARGS}])


@contextlib.contextmanager
def teacher_server(folder, model, *flags):
    """`prl inference` with the teacher; the flags that name it to `prl rl`."""
    port = harness.free_port()
    log = folder / "teacher.log"
    with harness.running("inference", "--model.name", model, "--model.served-name", "teacher", "--model.max-model-len", 320, "--server.port", port,
                         *flags, log=log) as process:
        harness.wait_until(lambda: process.poll() is not None or harness.is_healthy(port), 60, "the teacher's server")
        check(process.poll() is None, f"the teacher's server ended:\n{log.read_text()[-3000:]}")
        yield ["--orchestrator.teacher.model.name", "teacher", "--orchestrator.teacher.client.base-url", f"http://127.0.0.1:{port}/v1"]


def beginner(folder):
    """A model that has seen a little of the task: it writes the tags, and reverses hardly anything."""
    data = harness.sft_data(folder / "few.jsonl", 512)
    base = harness.tiny_model(folder / "base")
    prl("sft", "--model.name", base, "--data.name", data, "--data.seq-len", 256, "--data.batch-size", 8, "--max-steps", 24, "--optim.lr", "5e-3",
        "--ckpt", "--output-dir", folder / "sft")
    return folder / "sft/weights/step_24"


def evaluated(steps):
    return ["--orchestrator.eval.env", ENV, "--orchestrator.eval.num-examples", 32, "--orchestrator.eval.interval", steps,
            "--orchestrator.eval.sampling.max-completion-tokens", 48]


def column(rows, name, steps):
    check(all(name in rows[step] for step in range(1, steps + 1)), f"{name} is not told at every step: {sorted(rows[1])}")
    return [rows[step][name] for step in range(1, steps + 1)]


def mean(values):
    return sum(values) / len(values)


def test_a_student_that_is_its_teacher_has_a_distance_of_exactly_zero():
    with harness.workspace("same") as folder:
        model = harness.warm_model()
        config = harness.rl_config(folder / "rl.toml", model, max_steps=1, max_async_level=0)
        for deployment in ([], ["--deployment.type", "single_node", "--inference.server.port", harness.free_port()]):
            out = folder / f"out{len(deployment)}"
            with teacher_server(folder, model) as teacher:
                prl("rl", "@", config, "--output-dir", out, "--orchestrator.training-mode", "opd", *teacher, *deployment)
            row = harness.metrics(out)[1]
            for name in ("ref_kl/mean", "ref_kl/max", "teacher_kl/mean", "mismatch_kl/all/mean", "loss/mean", "optim/grad_norm"):
                check(row[name] == 0, f"{name} is {row[name]} for the same weights")
            check(row["ref_kl/std"] == 0 and row["entropy/all/mean"] > 0, f"{row}")
            check(row["time/teacher_logprobs"] > 0, "the time of the teacher is not told")


def test_on_policy_distillation_brings_the_student_to_its_teacher():
    steps = 32
    with harness.workspace("opd") as folder:
        config = harness.rl_config(folder / "rl.toml", beginner(folder), max_steps=steps, max_async_level=0)
        with teacher_server(folder, harness.warm_model()) as teacher:
            prl("rl", "@", config, "--output-dir", folder / "out", "--orchestrator.training-mode", "opd", "--trainer.optim.lr", "1e-3",
                "--orchestrator.batch-size", 64, *evaluated(steps), *teacher)
        rows = harness.metrics(folder / "out")
        distance = column(rows, "ref_kl/mean", steps)
        before, after = rows[0]["eval/reverse-text/avg@1"], rows[steps]["eval/reverse-text/avg@1"]
        print(f"      distance to the teacher {mean(distance[:2]):.3f} -> {mean(distance[-2:]):.3f}, reward {before:.3f} -> {after:.3f}")
        check(mean(distance[-2:]) < mean(distance[:2]) / 2, f"the distance did not halve: {distance}")
        check(after > before, f"the reward went from {before} to {after}")
        check(column(rows, "teacher_kl/mean", steps)[0] == -distance[0], "teacher_kl is not the other sign of ref_kl")
        check(0 < rows[2]["ref_kl/is_masked/mean"] < 1 or rows[1]["ref_kl/is_masked/mean"] == 0, "the mask is not told")


def test_hard_distillation_trains_on_what_the_teacher_wrote():
    steps = 24
    with harness.workspace("hard") as folder:
        student = beginner(folder)
        config = harness.rl_config(folder / "rl.toml", student, max_steps=steps, max_async_level=0)
        with teacher_server(folder, harness.warm_model()) as teacher:
            prl("rl", "@", config, "--output-dir", folder / "out", "--orchestrator.training-mode", "sft", "--trainer.optim.lr", "2e-3",
                "--orchestrator.batch-size", 32, *evaluated(steps), *teacher)
        rows = harness.metrics(folder / "out")
        nll, reward = column(rows, "nll/mean", steps), column(rows, "reward/all/mean", steps)
        before, after = rows[0]["eval/reverse-text/avg@1"], rows[steps]["eval/reverse-text/avg@1"]
        print(f"      nll {mean(nll[:3]):.3f} -> {mean(nll[-3:]):.3f}; the teacher's reward {mean(reward):.3f}, the student's {before:.3f} -> {after:.3f}")
        check(mean(nll[-3:]) < 0.75 * mean(nll[:3]), f"the loss did not fall: {nll}")
        check(after > before + 0.02, f"the student's reward went from {before} to {after}")
        check(rows[1]["mismatch_kl/all/mean"] == 0 and rows[1]["entropy/all/mean"] > 0, "another model's tokens have no mismatch, and an entropy")


def test_the_teachers_tokenizer_matters_for_its_scores_alone():
    with harness.workspace("tokenizers") as folder:
        other = shutil.copytree(harness.warm_model(), folder / "other")
        swap_ids(other, "a", "b")
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=2)
        with teacher_server(folder, other) as teacher:
            prl("rl", "@", config, "--output-dir", folder / "sft", "--orchestrator.training-mode", "sft", *teacher)
            check("nll/mean" in harness.metrics(folder / "sft")[2], "text of another tokenizer was not trained on")
            _, stderr = prl("rl", "@", config, "--output-dir", folder / "opd", "--orchestrator.training-mode", "opd", *teacher, expect=None)
            check("has another tokenizer" in stderr, f"opd with another tokenizer: {stderr[-2000:]}")


def test_requests_to_the_teacher_say_whose_rollout_they_are():
    with harness.workspace("headers") as folder, chat_server.Server(lambda _: {"content": "words"}, "teacher") as teacher:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=1)
        prl("rl", "@", config, "--output-dir", folder / "out", "--orchestrator.training-mode", "sft", "--orchestrator.teacher.model.name", "teacher",
            "--orchestrator.teacher.client.base-url", teacher.url, "--orchestrator.teacher.client.extra-headers-from-state",
            '{"X-Task": "task", "X-Row": "example_id", "X-Seat": "rollout_idx", "X-Session-ID": "trajectory_id"}')
        asked = [headers for path, headers in zip(teacher.paths, teacher.headers) if path.endswith("/chat/completions")]
        check(len(asked) >= 8 and {headers["X-Task"] for headers in asked} == {"reverse-text"}, asked[:2])
        seats = [(headers["X-Session-ID"], int(headers["X-Row"]), int(headers["X-Seat"])) for headers in asked]
        check(len(set(seats)) == len({session for session, _, _ in seats}) == len(seats), f"two rollouts have one name: {seats}")
        check(all(session.endswith(f"-{row}-{seat}") for session, row, seat in seats), f"of other rollouts: {seats[:4]}")


def swap_ids(model, first, second):
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(tokenizer))


def test_the_launcher_starts_the_teacher():
    with harness.workspace("teacher-inference") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=2)
        out, port = folder / "out", harness.free_port()
        stdout, stderr = prl("rl", "@", config, "--output-dir", out, "--orchestrator.training-mode", "opd", "--inference.server.port", port,
                             "--teacher-inference.server.port", harness.free_port(), "--teacher-inference.model.name", harness.warm_model(),
                             "--teacher-inference.model.max-model-len", 320, "--teacher-inference.server.api-key", "secret",
                             "--orchestrator.teacher.client.api-key-var", "TEACHER_KEY")
        check("ref_kl/mean" in harness.metrics(out)[2], "no distance was told")
        check((out / "logs/latest/teacher_inference.log").stat().st_size > 0, "the teacher has no log")
        check("secret" not in (out / "configs/teacher_inference.json").read_text(), "the key is in the resolved configuration")


def test_a_teacher_that_goes_away_ends_the_run_with_its_name():
    with harness.workspace("gone") as folder:
        config = harness.rl_config(folder / "rl.toml", harness.warm_model(), max_steps=50)
        with teacher_server(folder, harness.warm_model()) as teacher:
            missing = [*teacher[:1], "someone-else", *teacher[2:]]
            _, stderr = prl("rl", "@", config, "--output-dir", folder / "missing", "--orchestrator.training-mode", "opd", *missing, expect=None)
            check("does not serve the model someone-else" in stderr, f"{stderr[-2000:]}")
        _, stderr = prl("rl", "@", config, "--output-dir", folder / "gone", "--orchestrator.training-mode", "opd", *teacher,
                        "--orchestrator.teacher.client.wait-for-ready-timeout", 1, expect=None)
        check(teacher[3].removesuffix("/v1") in stderr, f"the teacher's address is not named: {stderr[-2000:]}")


harness.main(test_a_student_that_is_its_teacher_has_a_distance_of_exactly_zero, test_on_policy_distillation_brings_the_student_to_its_teacher,
             test_hard_distillation_trains_on_what_the_teacher_wrote, test_the_teachers_tokenizer_matters_for_its_scores_alone,
             test_requests_to_the_teacher_say_whose_rollout_they_are, test_the_launcher_starts_the_teacher,
             test_a_teacher_that_goes_away_ends_the_run_with_its_name)
