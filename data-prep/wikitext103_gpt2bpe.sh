#!/usr/bin/env bash
# WikiText-103, running text → GPT-2 BPE with RoBERTa's dictionary → OUT/binarised:
#   bash data-prep/wikitext103_gpt2bpe.sh [--from DIR] [OUT]
# DIR: wiki.{train,valid,test}.raw or the .zip; without it the archive is downloaded (into data/wikitext103_raw).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/_recipe.sh"
usage() { sed -n '2,4s/^# \{0,1\}//p' "$0"; }
case "${1:-}" in
  --help | -h) usage; exit 0 ;;
  --from) [ $# -ge 2 ] || { usage >&2; exit 2; }; from=$2; shift 2 ;;
  -*) usage >&2; exit 2 ;;
  *)
    "$python" -m moa_fairseq.cli prepare wikitext103_raw data/wikitext103_raw
    from=data/wikitext103_raw/text ;;
esac
[ $# -le 1 ] || { usage >&2; exit 2; }
exec "$python" -m moa_fairseq.cli gpt2-bpe "$experiment" --from "$from" --output "${1:-data/$experiment}"
