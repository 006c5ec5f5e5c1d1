#!/usr/bin/env bash
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_recipe.sh"
converted multi30k_ende_transformer_tiny "$@" -- --to moh --moh-shared-heads 1 --experts-per-token 1
recipe "$experiment" "$@"
