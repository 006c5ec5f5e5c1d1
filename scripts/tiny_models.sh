#!/usr/bin/env bash
# Trains three small English-German models (dense, MoA, MoH; about two million parameters) on Tatoeba, and exports them
# to where `moa-fairseq translate --model moa-tiny-en-de` looks: $MOA_FAIRSEQ_MODELS, else ~/.cache/moa_fairseq/models.
# Interrupted and run again, it goes on where it was.
#
#   bash scripts/tiny_models.sh deu.txt [--set KEY=VALUE ...]
#
# deu.txt: out of deu-eng.zip from https://www.manythings.org/anki (CC BY 2.0), plain or .gz.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
case ${1:---help} in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
[ -f "$1" ] || { echo "tiny_models.sh: error: $1 is not a file: give deu.txt, see --help." >&2; exit 2; }
pairs=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
shift
bash "$root/scripts/setup.sh"
cd "$root"
python=${VIRTUAL_ENV:-$root/.venv}/bin/python
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} PYTHONSAFEPATH=1 PYTHONUTF8=1
models=${MOA_FAIRSEQ_MODELS:-${XDG_CACHE_HOME:-$HOME/.cache}/moa_fairseq/models}
"$python" data-prep/tatoeba.py "$pairs" data/tatoeba
for family in transformer moa moh; do
  run=runs/tatoeba_ende_${family}_tiny
  "$python" -m moa_fairseq.cli recipe "tatoeba_ende_${family}_tiny" --data data/tatoeba --save-dir "$run" "$@"
  name=${family/transformer/dense}-tiny-en-de
  if [ ! -e "$models/$name" ]; then "$python" -m moa_fairseq.cli export "$run" "$models/$name"; fi
done
echo "Models in $models: moa-fairseq translate --model moa-tiny-en-de"
