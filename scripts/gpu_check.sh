#!/usr/bin/env bash
# Everything that only a GPU can tell, most valuable first: do the kernels compute what they should, how fast
# are layers and models, do the papers' comparisons hold at a small budget.
#
#   bash scripts/gpu_check.sh [--minutes N] [--device cuda|cpu] [--multi30k DIR] [--wikitext DIR] [--output DIR]
#
# Needs an environment in which moa_fairseq works (scripts/setup.sh; scripts/wheels.sh for a machine without
# network). Each step takes at most nine minutes, writes its results as they come (benchmarks: results/benchmarks,
# trainings: results/measured) and is skipped when it is done: run the same line again after an interruption, or
# with more minutes. --multi30k: data/task1/raw of multi30k/dataset; --wikitext: WikiText-2 or -103 as raw text.
# Without them the trainings on text are left out. --device cpu tries all of it in miniature, and writes to a
# folder of its own.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
minutes=100000 device=cuda multi30k='' wikitext='' output=
while [ $# -gt 0 ]; do
  case $1 in
    --minutes | --device | --multi30k | --wikitext | --output)
      [ $# -ge 2 ] || { echo "gpu_check.sh: error: $1 needs a value." >&2; exit 2; }
      declare "${1#--}=$2"; shift 2 ;;
    --help | -h) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;;
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
deadline=$((SECONDS + 60 * minutes)) longest=540
commit=$(git -C "$root" rev-parse --short HEAD 2>/dev/null || echo unknown)
failed=() unfinished=()

# step NAME COMMAND...: run it unless it is done, within the time that is left.
step() {
  local name=$1 done="$output/steps/$1.done" log="$output/steps/$1.log" left=$((deadline - SECONDS)) status
  shift
  if [ "$(cat "$done" 2>/dev/null)" = "$commit" ]; then echo "$name: done before"; return; fi
  if [ $left -le 0 ]; then echo "$name: no time left; run the same line again"; unfinished+=("$name"); return; fi
  echo "$name: $*"
  timeout --signal=INT --kill-after=30 $((left < longest ? left : longest)) "$@" > "$log" 2>&1
  status=$?
  case $status in
    0) echo "$commit" > "$done"; tail -n 3 "$log" | sed 's/^/  /' ;;
    124 | 137) echo "  ran out of time; run the same line again (log: $log)"; unfinished+=("$name") ;;
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

benchmark() { # benchmark NAME FLAG...
  local name=$1
  shift
  step "benchmark-$name${2:+-$2}" "$python" "benchmarks/$name.py" --device "$device" "$@" "${miniature[@]}"
}

# updates FLAG: fairseq's own trainer on made-up sentences; its log holds tokens a second, memory and loss scale.
updates() {
  step "updates-${1#--}" "$python" -m fairseq_cli.train --user-dir "$root/moa_fairseq" --task dummy_mt \
    --dict-size 32760 --src-len 30 --tgt-len 30 --arch "moa_transformer_$size" --share-all-embeddings \
    --criterion label_smoothed_cross_entropy_with_routing --label-smoothing 0.1 --optimizer adam --lr 0.0005 \
    --max-tokens "$tokens" --max-update "$few" --no-save --disable-validation --num-workers 0 \
    --log-interval 10 --log-format json --save-dir "$output/runs/updates" "$@"
}

if [ "$device" = cuda ]; then
  miniature=() size=big tokens=4096 few=60 many=2000 precisions=(--bf16 --fp16 --amp)
else
  miniature=(--miniature --rounds 1 --output "$output/benchmarks")
  size=tiny tokens=256 few=3 many=3 precisions=("--amp --cpu")
fi

# 1. What the kernels compute: every tile configuration; then the tests of the backends.
step kernels-validate "$python" -m moa_fairseq.kernels.validate --device "$device"
if [ "$device" = cuda ]; then step kernels-tests "$python" -m pytest -q -p no:cacheprovider tests/kernels; fi
# 2. Attention and its parts.
benchmark attention
benchmark kernels
benchmark sdpa
# 3. Whole models beside fairseq's dense ones.
benchmark training
benchmark generation
benchmark language_models
if [ "$device" = cuda ]; then benchmark training --dtype float16; fi
benchmark training --dtype amp
for precision in "${precisions[@]}"; do updates $precision; done
benchmark coordinate_descent
# 4. What they learn.
if [ -n "$multi30k" ]; then
  for model in transformer moa; do
    train "multi30k-$model" "multi30k_ende_${model}_tiny" "$multi30k" \
      "train.max_update=$many" average=null train.flags.warmup-updates=400
  done
fi
if [ -n "$wikitext" ]; then
  for row in transformer moa_8k8e128d moa_8k8e256d moa_8k16e256d moa_8k32e256d moa_8k64e256d; do
    train "table2-$row" "wikitext103_mlm_$row" "$wikitext" \
      "train.max_update=$many" train.max_epoch=null average=null train.flags.warmup-updates=200
  done
fi

[ "$device" = cuda ] && "$python" benchmarks/summary.py
echo "results: $([ "$device" = cuda ] && echo "$root/results" || echo "$output/benchmarks"); logs: $output/steps"
ls "$output/steps" | sed -n 's/\.done$//p' | sed 's/^/  done: /'
[ ${#unfinished[@]} -eq 0 ] || echo "  not finished: ${unfinished[*]}; run the same line again"
[ ${#failed[@]} -eq 0 ] || { echo "gpu_check.sh: failed: ${failed[*]}" >&2; exit 1; }
