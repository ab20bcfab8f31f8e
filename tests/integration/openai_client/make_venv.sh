#!/usr/bin/env bash
# Makes (or reuses) the Python environment of the client test and prints its interpreter. Usage: make_venv.sh [FOLDER]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-"$here/../../../build/openai-client-venv"}
stamp="$venv/.requirements"
if ! cmp -s "$here/requirements.txt" "$stamp" 2>/dev/null; then
  if ! python3 -m venv "$venv" >/dev/null 2>&1; then
    echo "openai_client: python3 -m venv does not work here; install python3-venv" >&2
    exit 1
  fi
  "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt" >&2
  cp "$here/requirements.txt" "$stamp"
fi
echo "$(cd "$venv" && pwd)/bin/python"
