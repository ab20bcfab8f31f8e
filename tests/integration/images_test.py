#!/usr/bin/env python3
"""Images in prompts: `prl inference` serves the model of tests/golden/vision, and a folder that `prl convert` makes of it."""
import base64
import json
import pathlib
import shutil
import struct

from harness import check, free_port, is_healthy, main, prl, request, running, tiny_model, wait_until, workspace

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
    return model


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


if __name__ == "__main__":
    main(images_are_served_and_kept_when_a_model_is_saved)
