#!/usr/bin/env bash
# Multi30k raw files → lower-cased, tokenised, 10,000 joint merges, binarised:  data-prep/multi30k.sh --data DIR
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/_recipe.sh"
recipe multi30k_ende_transformer_tiny --stage prepare "$@"
