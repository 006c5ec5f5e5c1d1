#!/usr/bin/env bash
# Sets up, then runs lint, type checks and tests, side by side on up to four cores. Arguments go to pytest:
#   bash scripts/test.sh --all               the tests marked thorough, too: kills, restarts, whole chains of commands
#   bash scripts/test.sh tests/layers/experts -x
#   bash scripts/test.sh --integrations      only tests/integrations, in an environment with transformers that it makes;
#                                            --all runs them where that environment is, and those of exported
#                                            models in each environment with another version
#   bash scripts/test.sh --zero-shot         only those of moa-fairseq zero-shot, with lm_eval in an environment that it
#                                            makes; --all runs them where that environment is
set -euo pipefail
export PYTHONUTF8=1

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
integrations() { # ENVIRONMENT ARGUMENTS…: without the fixtures of the other tests, which import fairseq
  local python=$1/bin/python
  shift
  (cd "$root" && OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} "$python" -m pytest --confcutdir tests/integrations "$@")
}
if [ "${1:-}" = "--integrations" ]; then
  bash "$root/scripts/setup.sh" --integrations
  shift
  [ -e "${1:-}" ] || set -- tests/integrations "$@" # before options for pytest
  integrations ".venv-integrations${TRANSFORMERS:+-${TRANSFORMERS##*==}}" "$@"
  exit
fi
zero_shot() {
  (cd "$root" && OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} .venv-zero-shot/bin/python -m pytest \
    tests/experiments/inference/test_zero_shot.py "$@")
}
if [ "${1:-}" = "--zero-shot" ]; then
  bash "$root/scripts/setup.sh" --zero-shot
  shift
  zero_shot "$@"
  exit
fi
bash "$root/scripts/setup.sh"
python=${VIRTUAL_ENV:-$root/.venv}/bin/python
cd "$root"
if ! "$python" -c 'import triton' 2>/dev/null; then
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
    -r scripts/requirements-triton.txt || echo "test.sh: no Triton for this platform; its tests will be skipped"
fi
if command -v chromium chromium-browser google-chrome >/dev/null && ! "$python" -c 'import playwright' 2>/dev/null; then
  "$python" -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
    -r scripts/requirements-browser.txt || echo "test.sh: no Playwright; the tests in a browser will be skipped"
fi
"$python" -m ruff check .
"$python" -m ruff format --check .
# Tests write and delete some 20,000 files: in memory, where there is room for them.
room=$(df -k --output=avail /dev/shm 2>/dev/null | tail -n 1 || true) # KiB
free=$(awk '/^MemAvailable/ {print $2}' /proc/meminfo 2>/dev/null || true)
if [ "${room:-0}" -gt 8000000 ] && [ "${free:-0}" -gt 8000000 ]; then TMPDIR=/dev/shm; fi
TMPDIR=$(mktemp -d "${TMPDIR:-/tmp}/moa-fairseq-tests.XXXXXX")
export TMPDIR
types=
trap 'if [ -n "$types" ]; then kill "$types" 2>/dev/null || true; fi; rm -rf "$TMPDIR"' EXIT
if "$python" -c 'import sys, torch; sys.exit(not torch.__version__.startswith("2.13."))'; then
  "$python" -m mypy > "$TMPDIR/types" 2>&1 & # beside the tests: it uses one core
  types=$!
else
  echo "test.sh: types are not checked: torch's own differ between versions, and these fit torch 2.13"
fi
for script in scripts/*.sh data-prep/*.sh; do bash -n "$script"; done
cores=$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 2) # nproc counts no more than OMP_NUM_THREADS
workers=$(((cores < 4 ? cores : 4) * 3 / 2)) # some tests wait for processes, signals, timeouts
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # of each of them
unset PYTHONDONTWRITEBYTECODE # else each of the tests' commands compiles the plugin anew
status=0
"$python" -m pytest --numprocesses "$workers" --dist worksteal "$@" || status=$?
if [ "${1:-}" = "--all" ]; then
  for stamp in .venv-integrations*/.moa_fairseq_setup; do # the last file that a set-up writes
    tests=(tests/integrations)
    # with another version than the pinned one: the models that are exported
    case $stamp in .venv-integrations-*) tests=(tests/integrations/test_mixture_*.py) ;; esac
    [ ! -e "$stamp" ] || integrations "${stamp%/*}" "${tests[@]}" || status=1
  done
fi
if [ "${1:-}" = "--all" ] && [ -d .venv-zero-shot ]; then
  zero_shot --all || status=1
fi
if [ -n "$types" ]; then
  wait "$types" || status=1
  cat "$TMPDIR/types"
fi
if [ "$status" -ne 0 ]; then # with the files of tests that failed
  echo "test.sh: what they wrote is left in $TMPDIR"
  trap - EXIT
fi
exit "$status"
