# Sourced by data-prep/<name>.sh: prepares the data set of the calling script's name with the project's Python.
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/_recipe.sh"
exec "$python" -m moa_fairseq.cli prepare "$(basename "$0" .sh)" "$@"
