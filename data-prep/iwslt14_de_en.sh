#!/usr/bin/env bash
# IWSLT14 German-English as fairseq makes it; --source en --target de turns it round
#   bash data-prep/iwslt14_de_en.sh [--from DIR] [--offline] [--workers N] [--source en --target de] [OUT]    (--help says more)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_prepare.sh"
