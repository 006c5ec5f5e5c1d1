#!/usr/bin/env bash
# Multi30k captions → lower-cased, tokenised, 10,000 joint merges, binarised (en-de; --target fr: en-fr)
#   bash data-prep/multi30k.sh [--from DIR] [--offline] [--workers N] [--target fr] [OUT]    (--help says more)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_prepare.sh"
