#!/usr/bin/env python3
"""Makes tests/golden/vision: a tiny random model for text and images, pictures, and what Hugging Face computes from them.

    python3 tools/make_vision_golden.py [OUT]      (default: tests/golden/vision beside this file)

Needs torch, torchvision, transformers, safetensors, numpy and pillow; any machine, no network. The folder has config.json and weights as
`save_pretrained` writes them, preprocessor_config.json, four pictures, and expected.safetensors:
  rgb.<picture> [H, W, 3] bytes as transformers makes them of the file; bytes.<picture> the same as the model's processor resizes them; resized.<picture>.<width>x<height> by torchvision's resize of bytes;
  pixels.<picture> [patches, values] and grid.<picture> [3] of the model's processor; features.<picture> [tokens, hidden] of the tower;
  ids [T], positions [3, T], logp [T] (of the next token, the last is 0) of a prompt with two pictures, in fp32 and eager attention.
"""
import json
import pathlib
import sys

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from torchvision.transforms.v2 import functional as vision_functional
from transformers.image_transforms import convert_to_rgb

TEXT = dict(vocab_size=272, hidden_size=48, intermediate_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
            head_dim=64, max_position_embeddings=256, rms_norm_eps=0.03, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
            pad_token_id=None, layer_types=["linear_attention", "full_attention", "linear_attention"], linear_num_key_heads=2,
            linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=32,
            rope_parameters=dict(rope_type="default", rope_theta=1e5, partial_rotary_factor=0.25, mrope_section=[3, 3, 2], mrope_interleaved=True))
# Heads of 20 elements, which no kernel has.
VISION = dict(depth=2, hidden_size=40, intermediate_size=56, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
              out_hidden_size=48, num_position_embeddings=36)
IMAGE, START, END = 261, 259, 260
PROCESSOR = dict(image_processor_type="Qwen2VLImageProcessorFast", patch_size=4, temporal_patch_size=2, merge_size=2,
                 size=dict(shortest_edge=256, longest_edge=1536), image_mean=[0.5, 0.5, 0.5], image_std=[0.5, 0.5, 0.5])
RESIZES = {"colours.png": [(24, 40), (96, 56), (5, 7)], "photo.jpg": [(64, 24), (17, 64)]}


def draw(width, height, channels, seed):
    """Slopes and stripes with a little noise."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    planes = [128 + 100 * np.sin(x / (3 + c) + y / (5 - c % 3)) + random.normal(0, 20, (height, width)) for c in range(channels)]
    return np.clip(np.stack(planes, -1), 0, 255).astype(np.uint8)


def make_pictures(out):
    Image.fromarray(draw(37, 29, 3, 1)).save(out / "colours.png")
    Image.fromarray(draw(50, 21, 3, 2)).save(out / "photo.jpg", quality=90)
    Image.fromarray(draw(16, 12, 4, 3), "RGBA").save(out / "clear.png")
    Image.fromarray(draw(19, 23, 1, 4)[..., 0], "L").save(out / "grey.png")
    return ["colours.png", "photo.jpg", "clear.png", "grey.png"]


def bytes_of(pixels, grid):
    """The picture that the patches are of, [H, W, 3]."""
    _, rows, cols = grid
    merge, patch = PROCESSOR["merge_size"], PROCESSOR["patch_size"]
    values = (pixels * 127.5 + 127.5).round().to(torch.uint8).reshape(rows // merge, cols // merge, merge, merge, 3, 2, patch, patch)[:, :, :, :, :, 0]
    return values.permute(0, 2, 5, 1, 3, 6, 4).reshape(rows * patch, cols * patch, 3)


def main():
    out = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent / "tests/golden/vision")
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = transformers.Qwen3_5Config(text_config=TEXT, vision_config=VISION, image_token_id=IMAGE, video_token_id=262,
                                        vision_start_token_id=START, vision_end_token_id=END, tie_word_embeddings=True)
    model = transformers.Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.15)
            elif name.endswith("bias"):
                p.normal_(0, 0.1)
            elif "norm" in name:
                p.add_(torch.randn_like(p) * 0.1)
    model.to(torch.bfloat16).save_pretrained(out)
    # Read again: casting has rounded the frequencies of rotations, too.
    model = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(out, dtype=torch.float32, attn_implementation="eager").eval()
    (out / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
    processor = transformers.Qwen2VLImageProcessor(**{k: v for k, v in PROCESSOR.items() if k != "image_processor_type"})

    expected = {}
    grids, pixels = {}, {}
    for name in make_pictures(out):
        picture = Image.open(out / name)
        rgb = torch.from_numpy(np.array(convert_to_rgb(picture, return_numpy=True)))
        expected[f"rgb.{name}"] = rgb
        for width, height in RESIZES.get(name, []):
            resized = vision_functional.resize(rgb.permute(2, 0, 1).contiguous(), [height, width],
                                               interpolation=vision_functional.InterpolationMode.BICUBIC, antialias=True)
            expected[f"resized.{name}.{width}x{height}"] = resized.permute(1, 2, 0).contiguous()
        made = processor(picture, return_tensors="pt")
        pixels[name], grids[name] = made["pixel_values"], made["image_grid_thw"]
        expected[f"pixels.{name}"] = made["pixel_values"]
        expected[f"bytes.{name}"] = bytes_of(made["pixel_values"], made["image_grid_thw"][0].tolist())
        expected[f"grid.{name}"] = made["image_grid_thw"][0].to(torch.int32)
        with torch.no_grad():
            expected[f"features.{name}"] = model.model.get_image_features(pixels[name], grids[name]).pooler_output[0]

    random = np.random.default_rng(5)
    text = lambda n: random.integers(3, 70, n).tolist()
    count = lambda name: int(grids[name].prod()) // 4
    shown = ["colours.png", "photo.jpg"]
    ids = text(5) + [START] + [IMAGE] * count(shown[0]) + [END] + text(4) + [START] + [IMAGE] * count(shown[1]) + [END] + text(20)
    ids = torch.tensor([ids])
    grid = torch.cat([grids[name] for name in shown])
    kinds = (ids == IMAGE).to(torch.int32)
    positions, _ = model.model.get_rope_index(ids, kinds, image_grid_thw=grid)
    with torch.no_grad():
        logits = model(input_ids=ids, pixel_values=torch.cat([pixels[name] for name in shown]), image_grid_thw=grid,
                       mm_token_type_ids=kinds).logits[0]
    logp = torch.log_softmax(logits, -1)
    expected["ids"] = ids[0].to(torch.int32)
    expected["positions"] = positions[:, 0].to(torch.int32).contiguous()
    expected["logp"] = torch.cat([logp[:-1].gather(1, ids[0, 1:, None])[:, 0], torch.zeros(1)])
    save_file({k: v.contiguous() for k, v in expected.items()}, out / "expected.safetensors", {"transformers": transformers.__version__,
                                                                                            "torch": torch.__version__.split("+")[0]})
    print(f"{out}: {sum(f.stat().st_size for f in out.iterdir())} bytes, {ids.shape[1]} tokens")


if __name__ == "__main__":
    main()
