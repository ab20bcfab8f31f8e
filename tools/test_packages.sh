#!/usr/bin/env bash
# Installs the Debian packages that tests use and the program does not: SLURM, for jobs on a real cluster of loopback nodes. Where they
# cannot be installed it says so in one line, and those tests are skipped.
set -uo pipefail
packages=(slurm-wlm slurm-client munge)
missing=()
for package in "${packages[@]}"; do
  [ "$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null)" = "install ok installed" ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" -ne 0 ]; then
  echo "test packages: ${missing[*]} need root to be installed; tests of jobs are skipped"
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
install() { timeout 300 apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1; }
install || { timeout 300 apt-get update -qq >/dev/null 2>&1; install; } ||
  echo "test packages: ${missing[*]} could not be installed; tests of jobs are skipped"
exit 0
