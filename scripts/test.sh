#!/usr/bin/env bash
# Sets up, then runs lint and tests. Arguments go to pytest: bash scripts/test.sh tests/kernels -x
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/setup.sh"
python=${VIRTUAL_ENV:-$root/.venv}/bin/python
cd "$root"
"$python" -m ruff check moa_fairseq tests setup.py
for script in scripts/*.sh data-prep/*.sh; do bash -n "$script"; done
exec "$python" -m pytest "$@"
