#!/usr/bin/env bash
# WikiText-2, 4,000 SentencePiece pieces
#   bash data-prep/wikitext2_sp4k.sh [--from DIR] [--offline] [--workers N] [OUT]    (--help says more)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_prepare.sh"
