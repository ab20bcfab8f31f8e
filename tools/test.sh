#!/usr/bin/env bash
# Runs every test of a build folder and ends with one line that counts what passed, was skipped and failed.
set -uo pipefail
build=${1:?usage: tools/test.sh BUILD_DIR [ctest options]}
shift
started=$(date +%s)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
tools/lint.sh || { echo "test: FAILED (lint)"; exit 1; }
# Unit tests need neither other Debian packages nor Python packages; the tests of clients, jobs, the page and the Python worker do.
if [[ " $* " != *" -L unit "* ]]; then
  tools/test_packages.sh
  python3 tests/integration/client_venv.py
  python3 tests/integration/page_browser/run.py --install
  python3 python/tests/venvs.py
fi
# Most integration tests wait for processes most of the time: one more than there are processors, at most eight, run at once.
jobs=$(( $(nproc) < 8 ? $(nproc) + 1 : 8 ))
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
