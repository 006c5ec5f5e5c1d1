#!/usr/bin/env bash
# Fetches what scripts/setup.sh installs, for a Linux machine (x86-64) that has no network:
#
#   bash scripts/wheels.sh [--subset] DIR [PYTHON]          PYTHON: its version, 3.11 or 3.12 (default 3.12)
#
# Every file is checked against scripts/requirements.txt. On the other machine, which must have a torch of its own:
#   PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR bash scripts/setup.sh
# --subset: only what a machine for machine learning lacks as a rule (23 MB in place of 149). There:
#   python3 -m pip install --no-index --no-deps --target SITE DIR/*.whl && export PYTHONPATH=SITE
export PYTHONSAFEPATH=1 PYTHONUTF8=1 # nothing is imported from the working directory
set -euo pipefail

case ${1:---help} in --help | -h) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
subset=
[ "$1" != --subset ] || { subset=yes; shift; }
[ $# -gt 0 ] || { echo "wheels.sh: error: name the folder for the wheels; see --help." >&2; exit 2; }
folder=$1 version=${2:-3.12} root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case $version in 3.11 | 3.12) ;; *) echo "wheels.sh: error: PYTHON $version: fairseq's wheels are for 3.11 and 3.12." >&2; exit 2 ;; esac
python=${VIRTUAL_ENV:-$root/.venv}/bin/python
[ -x "$python" ] || python=python3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fetch() { "$python" -m pip download --quiet --disable-pip-version-check --no-deps "$@"; }

wanted=$root/scripts/requirements.txt
if [ -n "$subset" ]; then
  # each with the lines of its hashes; the rest comes with torch, its vision and text libraries, and a plotter
  wanted=$work/requirements.txt
  for name in ve-fairseq hydra-core omegaconf antlr4-python3-runtime bitarray cffi pycparser sacremoses subword-nmt \
    polib tensorboardx mock; do
    sed -n "/^$name==/,/[^\\\\]\$/p" "$root/scripts/requirements.txt"
  done > "$wanted"
fi
fetch --require-hashes --requirement "$wanted" --python-version "$version" \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --dest "$work"
if [ -n "$subset" ]; then
  # what has no wheel is built here, so that nothing needs to be built there
  "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir "$work" "$work"/*.tar.gz
  rm "$work"/*.tar.gz
  use="python3 -m pip install --no-index --no-deps --target SITE $folder/*.whl && export PYTHONPATH=SITE"
else
  fetch --only-binary=:all: --dest "$work" wheel # what pip builds the requirements with that have no wheel
  use="PIP_NO_INDEX=1 PIP_FIND_LINKS=$folder bash scripts/setup.sh"
fi
mkdir -p "$folder"
rm -f "$work/requirements.txt"
mv -- "$work"/* "$folder"
(cd "$folder" && du -ah -- *)
echo "$folder: $(du -sh "$folder" | cut -f1) for Python $version. On a machine without network that has torch:"
echo "  $use"
