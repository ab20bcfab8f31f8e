#!/usr/bin/env python3
"""Images: `prl inference` serves the model of tests/golden/vision, a folder that `prl convert` makes of it, and what fine-tuning and RL make of it."""
import base64
import json
import os
import pathlib
import shutil
import struct

from harness import check, free_port, is_healthy, main, metrics, prl, request, rows_of, running, tensor_digest, tiny_model, wait_until, workspace

if len(os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")) < 2 or not os.path.exists("/dev/nvidia1"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a machine with fewer GPUs than the two ranks below: on its CPU

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "vision"
NAMES = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}{%- else %}
{%- for content in message.content %}
{%- if content.type == 'image' or 'image' in content or 'image_url' in content %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif 'text' in content %}{{- content.text }}{%- endif %}
{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def model_for_images(folder):
    """The golden model with a tokenizer of bytes."""
    text = tiny_model(folder / "text")
    model = folder / "model"
    shutil.copytree(GOLDEN, model)
    (model / "expected.safetensors").unlink()
    tokenizer = json.loads((text / "tokenizer.json").read_text())
    first = max(token["id"] for token in tokenizer["added_tokens"]) + 1
    for i, name in enumerate(NAMES):
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][-1], "id": first + i, "content": name})
    check(first + NAMES.index("<|image_pad|>") == json.loads((model / "config.json").read_text())["image_token_id"], "the placeholder's id")
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((text / "tokenizer_config.json").read_text())
    config["chat_template"] = TEMPLATE
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    shape = json.loads((model / "config.json").read_text())
    shape["text_config"]["max_position_embeddings"] = 4096
    (model / "config.json").write_text(json.dumps(shape))
    return model


ONE_SQUARE = {"num_turns": 1, "num_colors": 3, "image_size": 32, "system_prompt": "Red is A."}


def rl_toml(path, model, args, **keys):
    """In lock-step; `keys` of the orchestrator."""
    keys = {"batch_size": 16, "group_size": 4, **keys}
    args = ", ".join(f"{key} = {json.dumps(value)}" for key, value in args.items())
    path.write_text(f"""
max_steps = 3
seq_len = 512
ckpt = {{}}
model = {{ name = {json.dumps(str(model))}, vlm = {{}} }}
trainer = {{ deterministic = true, optim.lr = 1e-3, compute.dtype = "float32" }}
inference = {{ max_num_seqs = 64, model.max_model_len = 512, model.dtype = "float32" }}
[orchestrator]
train.sampling.max_completion_tokens = 3
train.filter_zero_advantages = false
""" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items()) + f"""
[[orchestrator.train.env]]
id = "color-codeword"
args = {{ {args} }}
""")
    return path


def warm(folder):
    """A model that begins to name the colour of a square, and its data."""
    model, data = model_for_images(folder), folder / "data.jsonl"
    prl("make-data", "--output", data, "--num-examples", 128, "--env.id", "color-codeword", "--env.args", json.dumps(ONE_SQUARE))
    return data, fine_tune(model, data, folder / "warm")


def fine_tune(model, data, out, *flags):
    prl("sft", "--model.name", model, "--model.vlm", "--data.name", data, "--data.seq-len", 256, "--data.batch-size", 8, "--max-steps", 10, "--optim.lr",
        "3e-3", "--ckpt", "--compute.dtype", "float32", "--output-dir", out, *flags)
    return out / "weights/step_10"


def tensors_of(path):
    """Name to bytes."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    return {name: data[8 + size + entry["data_offsets"][0]:8 + size + entry["data_offsets"][1]] for name, entry in header.items()
            if name != "__metadata__"}


def uri(name):
    kind = "png" if name.endswith("png") else "jpeg"
    return f"data:image/{kind};base64," + base64.b64encode((GOLDEN / name).read_bytes()).decode()


def chat(port, *parts, expect=200, **more):
    content = [{"type": "image_url", "image_url": {"url": part}} if part.startswith(("data:", "http")) else {"type": "text", "text": part} for part in parts]
    status, reply = request(port, "POST", "/v1/chat/completions",
                            {"messages": [{"role": "user", "content": content}], "max_tokens": 6, "temperature": 0, "logprobs": True, **more})
    check(status == expect, f"wanted {expect}, found {status}: {reply}")
    return reply


def drawn(reply):
    return [(entry["token"], entry["logprob"]) for entry in reply["choices"][0]["logprobs"]["content"]]


def images_are_served_and_kept_when_a_model_is_saved():
    with workspace("images") as folder:
        model, converted = model_for_images(folder), folder / "converted"
        prl("convert", model, "--output-dir", converted)
        before, after = tensors_of(model / "model.safetensors"), tensors_of(converted / "model.safetensors")
        check(before == after, f"a converted folder differs in {[name for name in before if before[name] != after.get(name)]}")
        replies = []
        for served in (model, converted):
            port = free_port()
            with running("inference", "--model.name", served, "--server.port", port, "--max-model-len", 200, "--model.dtype", "float32") as server:
                wait_until(lambda: server.poll() is not None or is_healthy(port), 60, "the server")
                first = chat(port, "What is ", uri("colours.png"), " beside ", uri("photo.jpg"), "?")
                check(first["usage"]["prompt_tokens"] > 60, f"{first['usage']}")
                again = chat(port, "What is ", uri("colours.png"), " beside ", uri("photo.jpg"), "?")
                other = chat(port, "What is ", uri("photo.jpg"), " beside ", uri("colours.png"), "?")
                check(again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0, f"{again['usage']}")
                check(drawn(first) == drawn(again) != drawn(other), f"{drawn(first)}\n{drawn(again)}\n{drawn(other)}")
                replies.append(drawn(first))
                refused = chat(port, "Look: ", "https://example.org/cat.png", expect=400)
                check(refused["error"]["param"] == "messages[0].content[1].image_url", f"{refused}")
                check("makes no requests of its own" in refused["error"]["message"], f"{refused}")
        check(replies[0] == replies[1], f"{replies}")


def models_learn_from_images():
    with workspace("images-rl") as folder:
        data, warmed = warm(folder)
        learn(folder, data, warmed)
        compare_shapes(folder, warmed)
        play_in_a_worker(folder, warmed)
        refuse_without_the_key(folder)


def learn(folder, data, warmed):
    before, after = tensors_of(folder / "model/model.safetensors"), tensors_of(warmed / "model.safetensors")
    wide = {name: b"".join(b"\0\0" + data[i:i + 2] for i in range(0, len(data), 2)) for name, data in before.items()}  # as float32
    check(any(wide[name] != after[name] for name in wide), "nothing was trained")
    check(all(wide[name] == after[name] for name in wide if ".visual." in name), "the tower is frozen")
    check((warmed / "preprocessor_config.json").exists(), "what is saved reads images")
    # Two ranks that hold a part of each layer, and recompute.
    ranks = fine_tune(folder / "model", data, folder / "ranks", "--deployment.num-gpus", 2, "--model.reshard-after-forward", "--model.ac")
    check(tensor_digest(ranks) == tensor_digest(warmed), "two ranks give other weights than one")
    prl("rl", "@", rl_toml(folder / "rl.toml", warmed, ONE_SQUARE, batch_size=64, group_size=8), "--max-steps", 12, "--output-dir", folder / "rl")
    rows = metrics(folder / "rl")
    kl = [rows[step]["mismatch_kl/all/max"] for step in range(1, 13)]
    check(kl == [0] * 12, f"sampler and trainer differ: {kl}")
    rewards = [rows[step]["reward/all/mean"] for step in range(1, 13)]
    check(sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1, f"no more squares are named than at first: {rewards}")
    report = prl("eval", "--model.name", folder / "rl/weights/step_12", "--env.id", "color-codeword", "--env.args", json.dumps(ONE_SQUARE),
                 "--num-examples", 16, "--sampling.max-completion-tokens", 3, "--output-dir", folder / "eval")
    lines = [row for path in (folder / "eval").rglob("*.jsonl") for row in rows_of(path) if "image_url" in json.dumps(row)]
    check(len(lines) >= 16, f"no images in what an evaluation leaves: {report}")


def compare_shapes(folder, warmed):
    """A process per role gives the same bits: pictures go over HTTP to the engine and through a queue to the trainer; three turns are one sample."""
    for name, args in {"one": ONE_SQUARE, "three": {**ONE_SQUARE, "num_turns": 3}}.items():
        config = rl_toml(folder / f"{name}.toml", warmed, args)
        renderer = ["--orchestrator.renderer.name", "qwen3.5", "--orchestrator.renderer.chat-template-kwargs", '{"enable_thinking": false}']
        renderer = renderer if name == "three" else []  # the chat template writes each conversation anew
        digests = []
        for shape, flags in {"process": [], "roles": ["--deployment.type", "single_node"]}.items():
            out = folder / f"{name}-{shape}"
            prl("rl", "@", config, "--output-dir", out, *flags, *renderer)
            rows = metrics(out)
            check([rows[step]["mismatch_kl/all/max"] for step in (1, 2, 3)] == [0, 0, 0], f"{name}, {shape}: {rows}")
            check(rows[3]["samples_per_rollout/all/max"] == 1, f"{name}, {shape}: turns with images fall apart")
            digests.append(tensor_digest(out / "weights/step_3"))
        check(digests[0] == digests[1], f"{name}: other weights with a process per role")
        check(name == "three" or digests[0] != tensor_digest(warmed), "nothing was trained")


def play_in_a_worker(folder, warmed):
    """An environment in a Python worker, whose messages come with images."""
    config = rl_toml(folder / "python.toml", warmed, {})
    config.write_text(config.read_text().partition("[[orchestrator.train.env]]")[0] + f"""
[[orchestrator.train.env]]
id = "words"
kind = "fake"
num_workers = 1
args = {{ turns = 2, image = "{uri("grey.png")}" }}
""")
    prl("rl", "@", config, "--output-dir", folder / "python")
    rows = metrics(folder / "python")
    check([rows[step]["mismatch_kl/all/max"] for step in (1, 2, 3)] == [0, 0, 0], f"images of a worker: {rows}")
    seen = [row for path in (folder / "python").rglob("train_rollouts.jsonl") for row in rows_of(path)]
    shown = [json.dumps([row["prompt"], row["completion"]]).count("data:image/png") for row in seen]
    check(seen and set(shown) == {2}, f"images that rollouts show: {shown}")


def refuse_without_the_key(folder):
    config = folder / "one.toml"
    config.write_text(config.read_text().replace(", vlm = {}", ""))
    said = "".join(prl("rl", "@", config, "--output-dir", folder / "plain", expect=None))
    check("prompts of 'color-codeword' have images: set model.vlm" in said, said[-2000:])


if __name__ == "__main__":
    main(images_are_served_and_kept_when_a_model_is_saved, models_learn_from_images)
