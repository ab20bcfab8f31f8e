#!/usr/bin/env python3
"""`prl rl --bench` on random weights: reverse-text, sampler one step behind at most. Prints prl's own table of throughput and memory.

usage: rl.py PRL MODEL_FOLDER SHAPE [OPTIONS OF prl rl]; the folder is made when it is missing, of a SHAPE of models.py.
"""
import os
import subprocess
import sys
import tempfile

from models import ensure_model

OPTIONS = ["--seq-len", "2048", "--orchestrator.batch-size", "128", "--orchestrator.group-size", "8", "--inference.max-num-seqs", "128",
           "--orchestrator.train.sampling.max-completion-tokens", "128", "--orchestrator.train.sampling.min-tokens", "128",
           "--orchestrator.train.env.0.id", "reverse-text", "--orchestrator.train.env.0.args", '{"mode": "tiny"}']


def main():
    prl, model, shape = sys.argv[1], os.path.abspath(sys.argv[2]), sys.argv[3]
    ensure_model(prl, model, shape)
    with tempfile.TemporaryDirectory(prefix="prl-bench-rl-") as out:
        sys.exit(subprocess.run([prl, "rl", "--model.name", model, "--bench", "--output-dir", out, *OPTIONS, *sys.argv[4:]]).returncode)


if __name__ == "__main__":
    main()
