#!/usr/bin/env bash
# Measures prl and the peer (PyTorch + transformers, CPU) on the same shape in one run and prints the ratios.
# PRL_BENCH_PYTHON names an interpreter with torch and transformers; without it a virtual environment is made in build/peer.
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/bench
mkdir -p "$out"
cmake --preset release >/dev/null
ninja -C build/release prl
python=${PRL_BENCH_PYTHON:-build/peer/bin/python}
if [ ! -x "$python" ] && ! command -v "$python" >/dev/null; then
  echo "bench: making a virtual environment with torch and transformers in build/peer (several GB)"
  python3 -m venv build/peer
  build/peer/bin/pip install -q torch transformers
fi
threads=${PRL_BENCH_THREADS:-$(nproc)}
repeats=${PRL_BENCH_REPEATS:-3}
new=${PRL_BENCH_NEW_TOKENS:-64}
PRL_BENCH_PYTHON=$python build/release/bin/prl bench all --peer --num-repeats "$repeats" --completion-tokens "$new" --compute.num-threads "$threads" \
  --output-json "$out/prl.json" --overwrite
python3 bench/first_token.py build/release/bin/prl "$out/model"
