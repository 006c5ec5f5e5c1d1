#!/usr/bin/env bash
# Fetches what scripts/setup.sh installs, for a Linux machine (x86-64) that has no network:
#
#   bash scripts/wheels.sh DIR [PYTHON]          PYTHON: its version, 3.11 or 3.12 (default 3.12)
#
# Every file is checked against scripts/requirements.txt. On the other machine, which must have a torch of its own:
#   PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR bash scripts/setup.sh
set -euo pipefail

case ${1:---help} in --help | -h) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
folder=$1 version=${2:-3.12} root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case $version in 3.11 | 3.12) ;; *) echo "wheels.sh: error: PYTHON $version: fairseq's wheels are for 3.11 and 3.12." >&2; exit 2 ;; esac
python=${VIRTUAL_ENV:-$root/.venv}/bin/python
[ -x "$python" ] || python=python3

"$python" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes \
  --requirement "$root/scripts/requirements.txt" --python-version "$version" \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  --dest "$folder"
# what pip builds the requirements with that have no wheel
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$folder" wheel
(cd "$folder" && du -ah -- *.whl *.tar.gz)
echo "$folder: $(du -sh "$folder" | cut -f1) for Python $version. On a machine without network that has torch:"
echo "  PIP_NO_INDEX=1 PIP_FIND_LINKS=$folder bash scripts/setup.sh"
