#!/usr/bin/env bash
# Prepares the data set of the calling link's name with the project's Python (--help says more):
#   bash data-prep/NAME.sh [--from DIR] [--offline] [--workers N] [OUT]
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/_recipe.sh"
exec "$python" -m moa_fairseq.cli prepare "$(basename "$0" .sh)" "$@"
