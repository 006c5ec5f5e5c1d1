#!/usr/bin/env bash
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_recipe.sh"
recipe "$experiment" "$@"
