#!/usr/bin/env bash
# ListOps: nested MIN, MAX, MED and SM of digits, drawn by a seed; a data set of ten classes
#   bash data-prep/listops.sh [--sizes 1000000 2000 10000] [--seed N] [--workers N] [OUT]    (--help says more)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_prepare.sh"
