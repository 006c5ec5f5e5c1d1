# Sourced by scripts/<experiment>.sh: runs the recipe of the calling script's name with the project's Python.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
experiment="$(basename "$0" .sh)"
python="${VIRTUAL_ENV:-$root/.venv}/bin/python"
[ -x "$python" ] || python="$(command -v python || command -v python3)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONSAFEPATH=1 PYTHONUTF8=1   # nothing is imported from the working directory
needed='import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in ("torch", "fairseq", "yaml")))'
"$python" -c "$needed" || { echo "$python lacks torch, fairseq or PyYAML: run bash scripts/setup.sh first" >&2; exit 2; }
# recipe NAME OPTIONS: the shipped recipe of that name, whatever the working directory has
recipe() { exec "$python" -m moa_fairseq.cli recipe "$root/configs/$1.yaml" "${@:2}"; }
# converted RUN ARGUMENTS -- FLAGS: make runs/<experiment>.pt of another run's average, unless only asked for a plan
converted() {
  local run="$1" target="runs/$experiment.pt"; shift
  while [ "$1" != "--" ]; do case "$1" in --dry-run|--plan|-h|--help) return;; esac; shift; done; shift
  [ -e "$target" ] || "$python" -m moa_fairseq.cli convert "runs/$run/average.pt" "$target" "$@"
}
