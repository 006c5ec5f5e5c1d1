#!/usr/bin/env bash
# WikiText-2, running text → GPT-2 BPE with RoBERTa's dictionary
#   bash data-prep/wikitext2_gpt2bpe.sh [--from DIR] [--offline] [--workers N] [OUT]    (--help says more)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_prepare.sh"
