#!/usr/bin/env bash
# enwik8: bytes, 90 / 5 / 5 million
#   bash data-prep/enwik8.sh [--from DIR] [--offline] [--workers N] [OUT]    (--help says more)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_prepare.sh"
