#!/usr/bin/env bash
# The op tests on a GPU under compute-sanitizer, each in a process of its own, several side by side. Only our own kernels are watched.
# usage: tools/cuda_check.sh [memcheck|racecheck|synccheck|initcheck] [FILTER]
#   PRL_CHECK_JOBS     processes at a time (default: cores but two, and 12 GiB of memory each: racecheck of fifteen has taken 124)
#   PRL_CHECK_SECONDS  a test's limit (default 600)
#   PRL_CHECK_PROGRAM  the test program (default: the release build's ops_cuda_test)
#   PRL_CHECK_SANITIZER  compute-sanitizer (default: that on PATH, or of /usr/local/cuda). That of CUDA 13.0, 2025.3, takes exceptions under
#                      racecheck in tests with large products of the library, in the one tried even with no kernel watched; 2026.4 did not there:
#                      pip install --target DIR nvidia-cuda-sanitizer-api==13.5.25; PRL_CHECK_SANITIZER=DIR/nvidia/cu13/bin/compute-sanitizer
# Both report copies of bytes (cp.async.bulk, but not its tensor form) as races with the reads of what they replace where one lane arrives
# for its warp, 2026.4 also where all do and after a barrier of all readers: so what is read by ordinary instructions comes by tensor copies.
# Of these 2026.4 sees no race at all. 2025.3 takes what one warp leaves before bar.arrive and another reads after bar.sync for a race.
# A test that memory was too short for is run again, alone, in the end. Tests take fewer and smaller cases (PRL_TEST_WATCHED). Several GPUs
# share the processes.
set -uo pipefail
tool=${1:-racecheck} filter=${2:-*}
cores=$(($(nproc) > 3 ? $(nproc) - 2 : 1)) by_memory=$(awk '/^MemTotal/ { n = int($2 / 1048576 / 12); print (n > 1 ? n : 1) }' /proc/meminfo)
jobs=${PRL_CHECK_JOBS:-$((cores < by_memory ? cores : by_memory))}
[ "$tool" = memcheck ] && options="--tool memcheck --report-api-errors no" || options="--tool $tool" # a test lets memory end
export PRL_CHECK_OPTIONS=$options PRL_CHECK_SECONDS=${PRL_CHECK_SECONDS:-600}
export PRL_CHECK_PROGRAM=${PRL_CHECK_PROGRAM:-build/release/src/ops/ops_cuda_test}
PRL_CHECK_SANITIZER=${PRL_CHECK_SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
[ -x "$PRL_CHECK_SANITIZER" ] || {
  echo "cuda_check: there is no $PRL_CHECK_SANITIZER; compute-sanitizer comes with the CUDA toolkit"
  exit 1
}
export PRL_CHECK_SANITIZER PRL_TEST_WATCHED=1
PRL_CHECK_GPUS=$(nvidia-smi -L 2>/dev/null | wc -l)
export PRL_CHECK_GPUS
[ -x "$PRL_CHECK_PROGRAM" ] || {
  echo "cuda_check: there is no $PRL_CHECK_PROGRAM; run make build, or set PRL_CHECK_PROGRAM"
  exit 1
}
PRL_CHECK_OUT=$(mktemp -d)
export PRL_CHECK_OUT PRL_CHECK_AGAIN=$PRL_CHECK_OUT/again
touch "$PRL_CHECK_AGAIN"
trap 'rm -rf "$PRL_CHECK_OUT"' EXIT
trap 'exit 130' INT TERM

check_one() {
  local name=$1 out begin=$SECONDS status
  [ "$PRL_CHECK_GPUS" -gt 1 ] && [ -n "${SLOT:-}" ] && export CUDA_VISIBLE_DEVICES=$((SLOT % PRL_CHECK_GPUS))
  out=$PRL_CHECK_OUT/${name//\//_}
  timeout "$PRL_CHECK_SECONDS" "$PRL_CHECK_SANITIZER" $PRL_CHECK_OPTIONS --kernel-name kns=prl --error-exitcode 9 --print-limit 5 \
    "$PRL_CHECK_PROGRAM" --gtest_filter="$name" >"$out" 2>&1
  status=$?
  local took="$((SECONDS - begin)) s"
  [ "$status" -eq 0 ] && grep -q '^\[  SKIPPED \]' "$out" && echo "skip  $name" && return 0
  case $status in
    0) echo "ok    $name ($took)" ;;
    *) [ -z "${PRL_CHECK_ALONE:-}" ] && grep -q "process didn't terminate successfully" "$out" && echo "$name" >>"$PRL_CHECK_AGAIN" && return 0 ;;&
    124) echo "LATE  $name: not done in $PRL_CHECK_SECONDS s" ;;
    *) echo "FAIL  $name ($took)" && { grep -E '^=========|Failure|error' "$out" || tail -n 5 "$out"; } | head -20 ;;
  esac
  [ "$status" -eq 0 ]
}
export -f check_one

# A suite's name stands alone on a line, its tests are indented below it.
list=$("$PRL_CHECK_PROGRAM" --gtest_list_tests --gtest_filter="$filter" 2>&1)
tests=$(awk '/^[^ ]/ { suite = $1; next } { print suite $1 }' <<<"$list")
[ -n "$tests" ] || {
  echo "cuda_check: there is no test for the filter $filter; $PRL_CHECK_PROGRAM says: ${list:-nothing}"
  exit 1
}
# What counts the device's free memory wants it for itself.
alone=$(grep 'CountsCopiesAndZeroes' <<<"$tests")
tests=$(grep -v 'CountsCopiesAndZeroes' <<<"$tests")
echo "cuda_check: $tool over $(printf '%s\n' $tests $alone | wc -l) tests, $jobs at a time"
status=0
printf '%s\n' $tests | xargs -r --process-slot-var=SLOT -P "$jobs" -I {} bash -c 'check_one {}' || status=1
alone+=" $(cat "$PRL_CHECK_AGAIN")"
export PRL_CHECK_ALONE=1
printf '%s\n' $alone | xargs -r -I {} bash -c 'check_one {}' || status=1
[ "$status" -eq 0 ] && echo "cuda_check: $tool found nothing" || echo "cuda_check: $tool FAILED, or not all tests were done"
exit "$status"
