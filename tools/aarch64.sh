#!/usr/bin/env bash
# Cross-compiles modules for arm64 and runs their unit tests under user-mode emulation. The libraries are Debian's arm64 packages,
# unpacked into build/aarch64-sysroot; nothing of this machine changes but for the compiler and the emulator.
#   tools/aarch64.sh [MODULE]...      default: the modules that compute; `all` builds and tests everything
#   tools/aarch64.sh run COMMAND...   builds prl and runs a command under which arm64 programs can be started (Linux 6.7 or newer), such as
#                                     build/aarch64/bin/prl doctor
set -euo pipefail
cd "$(dirname "$0")/.."
modules=("$@")
[ $# -gt 0 ] || modules=(base device tensor text ops autograd nn)
sysroot=build/aarch64-sysroot
build=build/aarch64
packages=(
  libstdc++-12-dev libc6-dev libboost1.81-dev libboost-json1.81-dev libfmt-dev libtomlplusplus-dev nlohmann-json3-dev libpcre2-dev
  libzmq3-dev cppzmq-dev libxxhash-dev libssl-dev zlib1g-dev libzstd-dev libsnappy-dev libyaml-dev libpng-dev libjpeg62-turbo-dev libgtest-dev libgmock-dev
)

tools/setup.sh
for program in aarch64-linux-gnu-g++ qemu-aarch64-static; do
  command -v $program >/dev/null && continue
  echo "aarch64: there is no $program; as root: apt-get install g++-aarch64-linux-gnu qemu-user-static" >&2
  exit 1
done

if [ ! -e "$sysroot/usr/include" ]; then
  echo "aarch64: fetching ${#packages[@]} arm64 packages and what they need into $sysroot"
  # A package database of its own: this machine's knows amd64 only, and arm64 needs no place in it.
  state=$PWD/build/aarch64-apt
  mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$sysroot.part"
  touch "$state/status"
  options=(-qq -o APT::Architecture=arm64 -o APT::Architectures=arm64 -o Dir::State="$state" -o Dir::State::status="$state/status"
           -o Dir::Cache="$state/cache" -o Debug::NoLocking=1)
  apt-get "${options[@]}" update
  apt-get "${options[@]}" install -y --download-only --no-install-recommends "${packages[@]}" >/dev/null
  for package in "$state"/cache/archives/*.deb; do dpkg -x "$package" "$sysroot.part"; done
  find "$sysroot.part" -type l -lname '/*' | while read -r link; do
    ln -sfr "$sysroot.part$(readlink "$link")" "$link"
  done
  mv "$sysroot.part" "$sysroot"
  rm -rf "$state"
fi

cmake -S . -B "$build" -G Ninja --toolchain cmake/aarch64.cmake -DPRL_CUDA=off >/dev/null
if [ "${modules[0]}" = run ]; then
  ninja -C "$build" -j "${JOBS:-$(nproc)}" prl
  export QEMU_LD_PREFIX=$PWD/$sysroot
  # A namespace has binary formats of its own: the kernel hands arm64 programs to the emulator here and nowhere else.
  exec unshare --user --map-root-user --mount bash -euc '
    mount -t binfmt_misc none /proc/sys/fs/binfmt_misc
    header="\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    mask="\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
    printf "%s" ":aarch64:M::$header:$mask:$0:F" >/proc/sys/fs/binfmt_misc/register
    exec "$@"' "$(command -v qemu-aarch64-static)" "${modules[@]:1}"
fi
# What a real CPU computes in 10 s takes more than half an hour here.
export GTEST_FILTER=${GTEST_FILTER:--MemoryPlanTest.ForetellsWhatADryStepMeasures}
if [ "${modules[*]}" = all ]; then
  ninja -C "$build" -j "${JOBS:-$(nproc)}"
  exec tools/test.sh "$build" -L unit
fi
tests=("${modules[@]/%/_test}")
ninja -C "$build" -j "${JOBS:-$(nproc)}" "${tests[@]}"
pattern=$(IFS='|'; echo "${tests[*]}")
exec tools/test.sh "$build" -L unit -R "^($pattern)\$"
