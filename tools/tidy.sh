#!/usr/bin/env bash
# The short list of .clang-tidy over the files that are named, or over those that differ from a commit (PRL_TIDY_BASE, else origin/main);
# a header stands for the source file beside it. Exit 1 on a finding.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v clang-tidy >/dev/null || { echo "tidy: there is no clang-tidy (Debian: apt-get install clang-tidy)"; exit 1; }
if [ $# -gt 0 ]; then
  changed=$(printf '%s\n' "$@")
else
  base=$(git merge-base "${PRL_TIDY_BASE:-origin/main}" HEAD)
  changed=$({ git diff --name-only "$base"; git ls-files --others --exclude-standard; } | sort -u)
fi
files=$(sed -nE 's/^(src\/.*)\.(cpp|hpp)$/\1.cpp/p' <<<"$changed" | sort -u | while read -r file; do [ ! -e "$file" ] || echo "$file"; done)
[ -n "$files" ] || { echo "tidy: no source file has changed"; exit 0; }
# clang reads neither GCC's precompiled headers nor files that are joined, and knows not all of GCC's options.
[ -e build/tidy/build.ninja ] || cmake --preset release -B build/tidy -DPRL_PRECOMPILE=OFF -DPRL_JOIN=OFF -DPRL_CUDA=off >/dev/null
xargs -P "${JOBS:-$(nproc)}" -n 1 clang-tidy --quiet -p build/tidy --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-unused-command-line-argument <<<"$files" && echo "tidy: clean, $(wc -l <<<"$files") files"
