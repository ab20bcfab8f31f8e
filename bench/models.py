"""Model folders with random weights for the benchmarks, in the shapes that `prl bench --shape` knows."""
import json
import os
import subprocess

SHAPES = {
    "tiny": "--family llama --vocab-size 512 --hidden-size 256 --intermediate-size 768 --num-layers 4 --num-heads 4 --num-kv-heads 2 "
            "--max-position-embeddings 2048",
    "smollm2-135m": "--family llama --vocab-size 49152 --hidden-size 576 --intermediate-size 1536 --num-layers 30 --num-heads 9 "
                    "--num-kv-heads 3 --max-position-embeddings 8192",
    "qwen3-0.6b": "--family qwen3 --vocab-size 151936 --hidden-size 1024 --intermediate-size 3072 --num-layers 28 --num-heads 16 "
                  "--num-kv-heads 8 --head-dim 128 --max-position-embeddings 40960",
    "qwen3-4b": "--family qwen3 --vocab-size 151936 --hidden-size 2560 --intermediate-size 9728 --num-layers 36 --num-heads 32 "
                "--num-kv-heads 8 --head-dim 128 --max-position-embeddings 40960",
    "qwen3-8b": "--family qwen3 --vocab-size 151936 --hidden-size 4096 --intermediate-size 12288 --num-layers 36 --num-heads 32 "
                "--num-kv-heads 8 --head-dim 128 --max-position-embeddings 40960 --no-tie-word-embeddings",
    "qwen3-30b-a3b": "--family qwen3_moe --vocab-size 151936 --hidden-size 2048 --intermediate-size 6144 --num-layers 48 --num-heads 32 "
                     "--num-kv-heads 4 --head-dim 128 --num-experts 128 --num-experts-per-tok 8 --moe-intermediate-size 768 --max-position-embeddings 40960 "
                     "--no-tie-word-embeddings",
}


def ensure_model(prl, folder, shape, more=()):
    """The folder, made when it is missing."""
    if not os.path.exists(os.path.join(folder, "config.json")):
        subprocess.run([prl, "init-model", "--output-dir", folder, "--dtype", "bfloat16", *SHAPES[shape].split(), *more], check=True)
    return folder


def ensure_config(prl, folder, shape, num_layers):
    """A folder without weights, for runs with debug.random_init; of that many layers."""
    ensure_model(prl, folder, shape, ["--num-layers", "1", "--num-experts", "8"] if "--num-experts" in SHAPES[shape] else ["--num-layers", "1"])
    words = SHAPES[shape].split()
    path = os.path.join(folder, "config.json")
    config = json.load(open(path))
    config["num_hidden_layers"] = num_layers
    if "--num-experts" in words:
        config["num_experts"] = int(words[words.index("--num-experts") + 1])
    json.dump(config, open(path, "w"))
    for name in os.listdir(folder):
        if name.endswith(".safetensors"):
            os.remove(os.path.join(folder, name))
    return folder
