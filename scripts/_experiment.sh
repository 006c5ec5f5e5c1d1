#!/usr/bin/env bash
# Runs the recipe NAME. The scripts/NAME.sh of the papers' own models are links to this file.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_recipe.sh"
recipe "$experiment" "$@"
