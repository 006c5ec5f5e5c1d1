#!/usr/bin/env bash
# WMT14 English-German as MoA's source made it; --flavour vaswani: as Google's Transformer authors shared it
#   bash data-prep/wmt14_en_de.sh [--from DIR] [--offline] [--workers N] [--flavour vaswani] [OUT]    (--help says more)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_prepare.sh"
