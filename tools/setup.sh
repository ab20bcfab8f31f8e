#!/usr/bin/env bash
# Installs the Debian packages that the build and the tests need. Says what is missing first; silent and quick when nothing is.
set -euo pipefail
packages=(
  g++ cmake ninja-build ccache pkg-config git python3
  libboost1.81-dev libboost-json1.81-dev libfmt-dev libtomlplusplus-dev nlohmann-json3-dev
  libpcre2-dev libzmq3-dev cppzmq-dev libxxhash-dev libssl-dev zlib1g-dev libzstd-dev libsnappy-dev libyaml-dev libpng-dev libjpeg62-turbo-dev libgloo-dev libgtest-dev libgmock-dev libbenchmark-dev
)
missing=()
for package in "${packages[@]}"; do
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  [ "$status" = "install ok installed" ] || missing+=("$package")
done
# A tool of the same name from elsewhere serves as well as the package.
keep=()
for package in "${missing[@]:-}"; do
  case "$package" in
    "") ;;
    g++) command -v g++ >/dev/null || keep+=("$package") ;;
    cmake) command -v cmake >/dev/null || keep+=("$package") ;;
    git) command -v git >/dev/null || keep+=("$package") ;;
    python3) command -v python3 >/dev/null || keep+=("$package") ;;
    ninja-build) command -v ninja >/dev/null || keep+=("$package") ;;
    *) keep+=("$package") ;;
  esac
done
[ ${#keep[@]} -eq 0 ] && exit 0
echo "setup: installing ${#keep[@]} Debian packages: ${keep[*]}"
run=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "setup: these packages need root; run as root: apt-get install ${keep[*]}" >&2; exit 1; }
  run=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
if ! "${run[@]}" apt-get install -y -qq --no-install-recommends "${keep[@]}" >/dev/null 2>&1; then
  "${run[@]}" apt-get update -qq
  "${run[@]}" apt-get install -y -qq --no-install-recommends "${keep[@]}" >/dev/null
fi
echo "setup: done"
