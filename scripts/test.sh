#!/usr/bin/env bash
# Sets up, then runs lint and tests. Arguments go to pytest: bash scripts/test.sh tests/kernels -x
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/scripts/setup.sh"
python=${VIRTUAL_ENV:-$root/.venv}/bin/python
cd "$root"
if ! "$python" -c 'import triton' 2>/dev/null; then
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
    -r scripts/requirements-triton.txt || echo "test.sh: no Triton for this platform; its tests will be skipped"
fi
"$python" -m ruff check moa_fairseq tests benchmarks setup.py
for script in scripts/*.sh data-prep/*.sh; do bash -n "$script"; done
exec "$python" -m pytest "$@"
