#!/usr/bin/env bash
# Runs every test of a build folder and ends with one line that counts what passed, was skipped and failed.
# usage: tools/test.sh [--build] BUILD_DIR [ctest options]      --build: builds everything first, with $JOBS jobs
set -uo pipefail
builds=no
[ "${1:-}" = --build ] && builds=yes && shift
build=${1:?usage: tools/test.sh [--build] BUILD_DIR [ctest options]}
shift
started=$(date +%s)
work=$(mktemp -d) log=$(mktemp)
preparing=()
# Both lie in groups of their own, so that none of their children outlives this script.
finish() {
  for pid in ${preparing[@]+"${preparing[@]}"}; do kill -- "-$pid" 2>/dev/null; done
  rm -rf "$work" "$log"
}
trap finish EXIT
trap 'exit 130' INT TERM
in_background() { # NAME COMMAND: what it says is shown once it has ended
  set -m
  bash -c "$2" >"$work/$1" 2>&1 </dev/null &
  preparing+=($!)
  set +m
}
tools/lint.sh || { echo "test: FAILED (lint)"; exit 1; }
# Unit tests need neither other Debian packages nor Python packages; the tests of clients, jobs, the page and the Python worker do. They
# come from the network most of the time, so beside the build.
if [[ " $* " != *" -L unit "* ]]; then
  in_background debian "tools/test_packages.sh; python3 tests/integration/page_browser/run.py --install"
  in_background python "python3 tests/integration/client_venv.py; python3 python/tests/venvs.py"
fi
if [ "$builds" = yes ]; then
  ninja -C "$build" -j "${JOBS:-$(nproc)}" || { echo "test: FAILED (build)"; exit 1; }
fi
[ ${#preparing[@]} -eq 0 ] || echo "test: waiting for the packages that tests use"
for pid in ${preparing[@]+"${preparing[@]}"}; do wait "$pid"; done
preparing=()
cat "$work"/* 2>/dev/null
# Most integration tests wait for processes most of the time: two more than there are processors, at most eight, run at once.
jobs=$(( $(nproc) < 7 ? $(nproc) + 2 : 8 ))
ctest --test-dir "$build" --output-on-failure --no-tests=error --parallel "${CTEST_PARALLEL_LEVEL:-$jobs}" "$@" 2>&1 | tee "$log"
status=${PIPESTATUS[0]}
passed=$(grep -cE '^ *[0-9]+/[0-9]+ Test .* Passed' "$log")
skipped=$(grep -cE '^ *[0-9]+/[0-9]+ Test .*\*\*\*Skipped' "$log")
total=$(grep -cE '^ *[0-9]+/[0-9]+ Test ' "$log")
seconds=$(( $(date +%s) - started ))
# What failed is said once more below all the rest: the tests by name and the first lines of each failure.
[ "$status" -eq 0 ] || python3 tools/failed_tests.py "$log"
verdict=OK
[ "$status" -eq 0 ] || verdict=FAILED
echo "test: $verdict, $passed of $total test programs passed, $skipped skipped, $((total - passed - skipped)) failed, $seconds s"
exit "$status"
