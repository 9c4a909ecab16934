#!/usr/bin/env bash
# Installs what is missing: Debian packages (with sudo where needed) and a .venv with pinned versions, torch first.
# Safe to run again: does nothing when nothing is missing.
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo"

packages=()
need() { command -v "$1" >/dev/null 2>&1 || PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null 2>&1 || packages+=("$2"); }
need mnexec mininet
need tc iproute2
need ss iproute2
need iptables iptables
need ethtool ethtool
need iperf3 iperf3
need ping iputils-ping
need tcpdump tcpdump
need setpriv util-linux
need ps procps
need ifconfig net-tools
if ! command -v "$python" >/dev/null 2>&1; then packages+=(python3 python3-venv); fi
if command -v "$python" >/dev/null 2>&1 && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then packages+=(python3-venv); fi
if [ "${#packages[@]}" -gt 0 ]; then
  echo "setup: installing Debian packages: ${packages[*]}"
  $sudo apt-get update -qq
  $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
fi

"$python" - <<'PY'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"setup: found Python {sys.version.split()[0]}, allowed is 3.11 or newer: make setup PYTHON=python3.11")
PY

stamp=.venv/.setup-stamp
wanted=$(cat constraints.txt pyproject.toml scripts/setup.sh | sha256sum)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi
echo "setup: making .venv"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip="env PIP_DISABLE_PIP_VERSION_CHECK=1 .venv/bin/python -m pip install -q"
# torch first and by its pin: without it a dependency would draw in a CUDA build of several gigabytes
if [ "$(uname -s)" = Linux ] && .venv/bin/python -c 'import torch' 2>/dev/null; then :; else
  # shellcheck disable=SC2046
  $pip $(grep -E '^torch==' constraints.txt) ${TORCH_PIP_ARGS:-}
fi
$pip -c constraints.txt 'setuptools>=77' wheel
$pip -c constraints.txt --no-build-isolation -e '.[dev,interop]'
echo "$wanted" > "$stamp"
