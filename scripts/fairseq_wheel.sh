#!/usr/bin/env bash
# Builds the wheel of fairseq (ve-fairseq 0.12.3) for a machine that has none on PyPI, such as a Mac or aarch64:
#
#   bash scripts/fairseq_wheel.sh DIR [PYTHON]       PYTHON: the program, of version 3.11 or 3.12 (default python3)
#
# Its Python files are those of the wheel for Linux on x86-64. Its compiled modules (batches, blocks of text, BLEU) are
# built here from the source of fairseq 0.12.2, which has the same ones. Both are pinned by their SHA-256. What nothing
# here uses is left out: libnat (Levenshtein Transformer) and libbase (BASE layers). It needs a C++ compiler.
export PYTHONSAFEPATH=1 PYTHONUTF8=1 # nothing is imported from the working directory
set -euo pipefail

case ${1:---help} in --help | -h) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
folder=$1 python=${2:-python3} root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
command -v "${CXX:-c++}" >/dev/null || {
  echo "fairseq_wheel.sh: error: fairseq has no wheel for $(uname -sm), and there is no C++ compiler (${CXX:-c++}) to build" \
    "one from source: install it (macOS: xcode-select --install; Debian: apt install g++ python3-dev) and run this again." >&2
  exit 1
}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip() { "$python" -m pip "$@" --quiet --disable-pip-version-check; }

sed -n '/^ve-fairseq==/,/[^\\]$/p' "$root/scripts/requirements.txt" > "$work/wheel.txt"
pip download --no-deps --require-hashes --requirement "$work/wheel.txt" --only-binary=:all: --dest "$work/wheel" \
  --platform manylinux_2_28_x86_64 --python-version "$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
echo "fairseq==0.12.2 --hash=sha256:34f1b18426bf3844714534162f065ab733e049597476daa35fffb4d06a92b524" > "$work/source.txt"
pip wheel --no-deps --require-hashes --requirement "$work/source.txt" --no-binary=fairseq --wheel-dir "$work/built"
pip install --target "$work/tools" "wheel>=0.40,<1"
export PYTHONPATH=$work/tools
"$python" -m wheel unpack --dest "$work" "$work"/wheel/*.whl >/dev/null
"$python" -m wheel unpack --dest "$work" "$work"/built/*.whl >/dev/null
cd "$work/ve_fairseq-0.12.3"
find . -name '*.so' -exec rm {} +
(cd ../fairseq-0.12.2 && find fairseq -name '*.so') | while read -r module; do cp "../fairseq-0.12.2/$module" "$module"; done
{ grep -v '^Tag:' ve_fairseq-0.12.3.dist-info/WHEEL | sed '/^$/d'; grep '^Tag:' ../fairseq-0.12.2/*.dist-info/WHEEL; } > ../WHEEL
mv ../WHEEL ve_fairseq-0.12.3.dist-info/WHEEL
cd - >/dev/null
mkdir -p "$folder"
"$python" -m wheel pack --dest-dir "$folder" "$work/ve_fairseq-0.12.3"
