#!/usr/bin/env bash
# WMT14 English-French as MoA's source made it: 40,000 joint merges
#   bash data-prep/wmt14_en_fr.sh [--from DIR] [--offline] [--workers N] [OUT]    (--help says more)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_prepare.sh"
