#!/usr/bin/env bash
# WikiText-103, 8,000 SentencePiece pieces, as SwitchHead's authors
#   bash data-prep/wikitext103_sp8k.sh [--from DIR] [--offline] [--workers N] [OUT]    (--help says more)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_prepare.sh"
