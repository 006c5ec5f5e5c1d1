#!/usr/bin/env bash
# Runs configs/NAME.yaml. Every scripts/NAME.sh without work of its own is a link to this file.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_recipe.sh"
recipe "$experiment" "$@"
