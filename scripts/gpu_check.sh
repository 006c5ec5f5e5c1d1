#!/usr/bin/env bash
# Everything that only a GPU can tell, most valuable first: do the kernels compute what they should, how fast
# are layers and models, do the papers' comparisons hold at a small budget.
#
#   bash scripts/gpu_check.sh [--minutes N] [--device cuda|cpu] [--multi30k DIR] [--wikitext DIR] [--output DIR]
#
# Needs an environment in which moa_fairseq works (scripts/setup.sh). Each step writes its results as they come
# (benchmarks: results/benchmarks, trainings: results/measured) and is skipped when it is done: run the same line
# again after an interruption, or with more minutes. --multi30k: data/task1/raw of multi30k/dataset; --wikitext:
# WikiText-2 or -103 as raw text. Without them the trainings are left out. --device cpu tries all of it in
# miniature, and writes to a folder of its own.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
minutes=100000 device=cuda multi30k='' wikitext='' output=
while [ $# -gt 0 ]; do
  case $1 in
    --minutes | --device | --multi30k | --wikitext | --output)
      [ $# -ge 2 ] || { echo "gpu_check.sh: error: $1 needs a value." >&2; exit 2; }
      declare "${1#--}=$2"; shift 2 ;;
    --help | -h) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "gpu_check.sh: error: unknown argument $1; see --help." >&2; exit 2 ;;
  esac
done
case $minutes in '' | *[!0-9]*) echo "gpu_check.sh: error: --minutes $minutes is no whole number." >&2; exit 2 ;; esac
for folder in "$multi30k" "$wikitext"; do
  [ -z "$folder" ] || [ -d "$folder" ] || { echo "gpu_check.sh: error: $folder is no folder." >&2; exit 2; }
done

python="${VIRTUAL_ENV:-$root/.venv}/bin/python"
[ -x "$python" ] || python="$(command -v python3)"
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONWARNINGS=ignore
"$python" - "$device" <<'EOF' || exit 2
import sys, torch
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("gpu_check.sh: error: torch sees no GPU: check nvidia-smi and torch's CUDA build, or try --device cpu.")
print("gpu_check.sh:", torch.cuda.get_device_name() if sys.argv[1] == "cuda" else "CPU, in miniature", "torch", torch.__version__)
EOF

output=${output:-$root/runs/gpu_check-$device}
mkdir -p "$output/steps" && cd "$root" || exit 2
deadline=$((SECONDS + 60 * minutes))
commit=$(git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)
failed=()

# step NAME COMMAND...: run it unless it is done, within the time that is left.
step() {
  local name=$1 done="$output/steps/$1.done" log="$output/steps/$1.log" left=$((deadline - SECONDS)) status
  shift
  if [ "$(cat "$done" 2>/dev/null)" = "$commit" ]; then echo "$name: done before"; return; fi
  if [ $left -le 0 ]; then echo "$name: no time left; run the same line again"; return; fi
  echo "$name: $*"
  timeout --signal=INT --kill-after=30 "$left" "$@" > "$log" 2>&1
  status=$?
  case $status in
    0) echo "$commit" > "$done"; tail -n 3 "$log" | sed 's/^/  /' ;;
    124 | 137) echo "  ran out of time; run the same line again (log: $log)" ;;
    *) echo "  FAILED with status $status (log: $log)"; tail -n 3 "$log" | sed 's/^/  /'; failed+=("$name") ;;
  esac
}

# train NAME CONFIG DATA SET...: one recipe at a small budget, recorded.
train() {
  local name=$1 config=$2 data=$3 keep=(--record "gpu_check_$1")
  shift 3
  [ "$device" = cuda ] || keep=(--gpus 0)
  step "$name" "$python" -m moa_fairseq.cli recipe "configs/$config.yaml" --data "$data" \
    --save-dir "$output/runs/$name" "${keep[@]}" $(printf -- '--set %s ' "$@")
}

results=() updates=2000
[ "$device" = cuda ] || { results=(--output "$output/benchmarks" --rounds 1); updates=20; }
step kernels-right "$python" -m pytest -q -p no:cacheprovider tests/kernels
for benchmark in attention kernels training generation; do
  step "benchmark-$benchmark" "$python" "benchmarks/$benchmark.py" --device "$device" "${results[@]}"
done
if [ -n "$multi30k" ]; then
  for model in transformer moa; do
    train "multi30k-$model" "multi30k_ende_${model}_tiny" "$multi30k" \
      "train.max_update=$updates" average=null train.flags.warmup-updates=400
  done
fi
if [ -n "$wikitext" ]; then
  for row in transformer moa_8k8e128d moa_8k8e256d moa_8k16e256d moa_8k32e256d moa_8k64e256d; do
    train "table2-$row" "wikitext103_mlm_$row" "$wikitext" \
      "train.max_update=$updates" train.max_epoch=null average=null train.flags.warmup-updates=200
  done
fi

echo "results: ${results[1]:-$root/results}; logs: $output/steps"
ls "$output/steps" | sed -n 's/\.done$//p' | sed 's/^/  done: /'
[ ${#failed[@]} -eq 0 ] || { echo "gpu_check.sh: failed: ${failed[*]}" >&2; exit 1; }
