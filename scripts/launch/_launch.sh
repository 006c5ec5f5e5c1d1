# Sourced by scripts/launch/*.sh: finds Python and the recipe, and sorts the options by the stage they belong to.
# usage: source _launch.sh EXPERIMENT [options of `moa-fairseq recipe`]
launch_name="$(basename "$0")"
usage() { sed -n '2,/^set /{/^#SBATCH/d;s/^# \{0,1\}//p;}' "$0"; }
fail() { echo "$launch_name: error: $*" >&2; exit 2; }
case "${1:-}" in -h|--help) usage; exit 0 ;; "" | -*) usage >&2; fail "name an experiment first (a file of configs/)" ;; esac
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
name="${1#configs/}"
found=("$here"/../../configs/*/"${name%.yaml}.yaml")   # in the folder of its data set
config="${found[0]}"
[ -f "$1" ] && config="$1"
[ -f "$config" ] || fail "there is no recipe $1 (looked for $config)"
experiment_name="$(basename "$config" .yaml)"
shift

source "$here/../_recipe.sh"
config="$(cd "$(dirname "$config")" && pwd)/$(basename "$config")"
run() { "$python" -m moa_fairseq.cli recipe "$config" "$@"; }

options=() restart=() record=() save_dir="runs/$experiment_name"
while [ $# -gt 0 ]; do
  case "$1" in
    --) shift; break ;;
    --stage | --stage=*) fail "leave --stage out: this script runs all stages, in the places where they belong" ;;
    --restart) restart=(--restart) ;;
    --record | --record=*)
      record=("$1")
      case "${2:--}" in -*) ;; *) record+=("$2"); shift ;; esac ;;
    --save-dir) save_dir="${2:?--save-dir DIR}"; options+=("$1" "$2"); shift ;;
    --save-dir=*) save_dir="${1#*=}"; options+=("$1") ;;
    *) options+=("$1") ;;
  esac
  shift
done
engine_options=("$@")   # what followed a lone --

prepare() { run ${options[@]+"${options[@]}"} ${restart[@]+"${restart[@]}"} --stage prepare; }
train() { run ${options[@]+"${options[@]}"} --stage train "$@"; }
# All stages: what is prepared and trained is skipped, the rest is for one machine.
finish() { run ${options[@]+"${options[@]}"} ${record[@]+"${record[@]}"}; }
