# Sourced by scripts/<experiment>.sh: runs the recipe of the calling script's name with the project's Python.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
experiment="$(basename "$0" .sh)"
python="$root/.venv/bin/python"
[ -x "$python" ] || python="$(command -v python3 || command -v python)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
recipe() { exec "$python" -m moa_fairseq.cli recipe "$root/configs/$1.yaml" "${@:2}"; }
