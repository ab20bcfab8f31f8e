"""Model folders with random weights for the benchmarks, in the shapes that `prl bench --shape` knows."""
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
}


def ensure_model(prl, folder, shape):
    """The folder, made when it is missing."""
    if not os.path.exists(os.path.join(folder, "config.json")):
        subprocess.run([prl, "init-model", "--output-dir", folder, "--dtype", "bfloat16", *SHAPES[shape].split()], check=True)
    return folder
