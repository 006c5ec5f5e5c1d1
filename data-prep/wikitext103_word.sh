#!/usr/bin/env bash
# WikiText-103, words
#   bash data-prep/wikitext103_word.sh [--from DIR] [--offline] [--workers N] [OUT]    (--help says more)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_prepare.sh"
