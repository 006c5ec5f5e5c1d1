#!/usr/bin/env bash
# Raw WikiText-103 → GPT-2 BPE with RoBERTa's dictionary → OUT/binarised:
#   data-prep/wikitext103_gpt2bpe.sh --from DIR [OUT]      DIR: wiki.{train,valid,test}.raw, or the .zip
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/_recipe.sh"
[ "${1:-}" = "--from" ] && [ $# -ge 2 ] && [ $# -le 3 ] || { sed -n '2,3s/^# \{0,1\}//p' "$0" >&2; exit 2; }
exec "$python" -m moa_fairseq.cli gpt2-bpe "$experiment" --from "$2" --output "${3:-data/$experiment}"
