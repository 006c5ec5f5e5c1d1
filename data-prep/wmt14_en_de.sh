#!/usr/bin/env bash
# WMT14 English-German as MoA's source made it; --flavour vaswani: as Google's Transformer authors shared
# it, in an archive that is no longer public; --flavour vaswani_rebuilt: its text, built from public archives
#   bash data-prep/wmt14_en_de.sh [--from DIR] [--offline] [--workers N] [--flavour vaswani] [OUT]    (--help says more)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_prepare.sh"
