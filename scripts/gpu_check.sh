#!/usr/bin/env bash
# Everything that only a GPU can tell, most valuable first: decoding by CUDA graphs, what bounds an update, are the
# kernels right and fast, do the papers' comparisons hold at a small budget, how fast are whole models. The first half
# hour tells most of it.
#
#   bash scripts/gpu_check.sh [--minutes N] [--device cuda|cpu] [--multi30k DIR] [--wikitext DIR] [--output DIR]
#
# Needs a Python with torch and what setup.sh installs: PYTHON, the active environment, .venv or python3, the
# first that has them (a machine without network: scripts/wheels.sh). A step takes at most nine minutes and is not
# begun in the last of --minutes: run the same line again, in calls as long as you like, and what is done is
# skipped. All that matters lies in one folder (--output, runs/gpu_check-DEVICE): results, logs, the verdict on the
# kernels and Triton's cache. Carry it to a machine of the same kind, and it goes on there; checkpoints
# stay behind. --multi30k: data/task1/raw of multi30k/dataset; --wikitext: WikiText-2 or -103 as raw text. Without
# them the trainings on text are left out. --device cpu tries all of it in miniature.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
minutes=100000 device=cuda multi30k='' wikitext='' output=
while [ $# -gt 0 ]; do
  case $1 in
    --minutes | --device | --multi30k | --wikitext | --output)
      [ $# -ge 2 ] || { echo "gpu_check.sh: error: $1 needs a value." >&2; exit 2; }
      declare "${1#--}=$2"; shift 2 ;;
    --help | -h) sed -n '2,16s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "gpu_check.sh: error: unknown argument $1; see --help." >&2; exit 2 ;;
  esac
done
case $minutes in '' | *[!0-9]*) echo "gpu_check.sh: error: --minutes $minutes is not a whole number." >&2; exit 2 ;; esac
case $device in cuda | cpu) ;; *) echo "gpu_check.sh: error: --device $device: cuda or cpu." >&2; exit 2 ;; esac
for folder in "$multi30k" "$wikitext"; do
  [ -z "$folder" ] || [ -d "$folder" ] || { echo "gpu_check.sh: error: $folder is not a folder. Give an existing folder." >&2; exit 2; }
done
deadline=$((SECONDS + 60 * minutes)) longest=540

python=
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" PYTHONWARNINGS=ignore PYTHONUTF8=1
for candidate in "${PYTHON:-}" "${VIRTUAL_ENV:+$VIRTUAL_ENV/bin/python}" "$root/.venv/bin/python" python3 python; do
  if [ -n "$candidate" ] && PYTHONSAFEPATH=1 "$candidate" -c 'import torch, fairseq' >/dev/null 2>&1; then
    python=$(command -v "$candidate")
    break
  fi
done
[ -n "$python" ] || { echo "gpu_check.sh: error: no Python here imports torch and fairseq: run scripts/setup.sh, or \
name one with PYTHON=/path/to/python (without network: scripts/wheels.sh --help)." >&2; exit 2; }
machine=$(PYTHONSAFEPATH=1 "$python" - "$device" <<'PROBE'
import platform, subprocess, sys, torch
try:
    import triton
except ImportError:
    triton = None
name, driver = platform.machine(), ""
if sys.argv[1] == "cuda":
    if not torch.cuda.is_available():
        sys.exit("gpu_check.sh: error: torch sees no GPU: check nvidia-smi and torch's CUDA build, or try --device cpu.")
    name, query = torch.cuda.get_device_name(), ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = ", driver " + subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        driver = ", driver unknown"
print(f"{name}{driver}, torch {torch.__version__}, triton {triton and triton.__version__}")
PROBE
) || exit 2
echo "gpu_check.sh: $machine, by $python$([ "$device" = cuda ] || echo ", in miniature")"

output=${output:-$root/runs/gpu_check-$device}
mkdir -p "$output/steps" "$output/measured" && output=$(cd "$output" && pwd) && cd "$root" || exit 2
scratch=$root/runs/gpu_check-$device-checkpoints
# the verdict of kernels.validate, and compiled kernels without what they were compiled from: a tenth of the size
export XDG_CACHE_HOME=$output/cache TRITON_CACHE_DIR=$output/cache/triton
export TRITON_STORE_BINARY_ONLY=1 TRITON_DISABLE_LINE_INFO=1
# a copy of the files need not be a clone: what a step was done with is their text
sources=$(find moa_fairseq benchmarks configs scripts tests/layers/experts -type f ! -name '*.pyc' | LC_ALL=C sort | xargs cat | cksum)
stamp="${sources%% *}; $machine"
failed=() unfinished=() names=() pids=() begun=

# start NAME SECONDS COMMAND...: in the background, unless it is done or less than SECONDS are left in this call.
start() {
  local name=$1 needs=$2 log="$output/steps/$1.log" left=$((deadline - SECONDS))
  shift 2
  if [ "$(cat "$output/steps/$name.done" 2>/dev/null)" = "$stamp" ]; then echo "$name: done before"; return; fi
  [ "$device" = cuda ] && [ -n "$begun" ] || needs=1
  if [ $left -lt "$needs" ]; then echo "$name: no time left"; unfinished+=("$name"); return; fi
  echo "$name: $*"
  begun=yes
  timeout --kill-after=20 $((left < longest ? left : longest)) "$@" > "$log" 2>&1 &
  pids+=($!) names+=("$name")
}

# finish: wait for what was started.
finish() {
  local i name log
  for i in "${!pids[@]}"; do
    name=${names[$i]} log="$output/steps/${names[$i]}.log"
    wait "${pids[$i]}"
    case $? in
      0) echo "$stamp" > "$output/steps/$name.done"; tail -n 3 "$log" | sed 's/^/  /' ;;
      124 | 137) echo "  $name ran out of time (log: $log)"; unfinished+=("$name") ;;
      *) echo "  $name FAILED (log: $log)"; tail -n 3 "$log" | sed 's/^/  /'; failed+=("$name") ;;
    esac
  done
  pids=() names=()
}
trap 'kill "${pids[@]}" 2>/dev/null; exit 130' INT TERM

step() { start "$@"; finish; }

benchmark() { # benchmark SECONDS NAME FLAG...
  local needs=$1 name=$2
  shift 2
  step "benchmark-$name${2:+-$2}" "$needs" "$python" "benchmarks/$name.py" --device "$device" "$@" \
    --output "$output/benchmarks" "${miniature[@]}"
}

# updates FLAG: fairseq's own trainer on made-up sentences; its log holds tokens a second, memory and loss scale.
updates() {
  step "updates-${1#--}" 60 "$python" -m fairseq_cli.train --user-dir "$root/moa_fairseq" --task dummy_mt \
    --dict-size 32760 --src-len 30 --tgt-len 30 --arch "moa_transformer_$size" --share-all-embeddings \
    --criterion label_smoothed_cross_entropy_with_routing --label-smoothing 0.1 --optimizer adam --lr 0.0005 \
    --max-tokens "$tokens" --max-update "$few" --no-save --disable-validation --num-workers 0 \
    --log-interval 10 --log-format json --save-dir "$scratch/updates" "$@"
}

# train NAME CONFIG DATA SET...: one recipe in the background; `gather` brings home what it left.
train() {
  local name=$1 config=$2 data=$3
  shift 3
  start "$name" 240 "$python" -m moa_fairseq.cli recipe "$config" --data "$data" \
    --save-dir "$scratch/$name" "${cpu[@]}" $(printf -- '--set %s ' "$@")
}
gather() {
  local run file
  finish
  for run in "$scratch"/*/; do
    run=$(basename "$run")
    for file in "$scratch/$run"/result.json "$scratch/$run"/train.jsonl "$scratch/$run"/generate-*.txt; do
      [ ! -f "$file" ] || { mkdir -p "$output/measured/$run" && cp "$file" "$output/measured/$run/"; }
    done
  done
}

if [ "$device" = cuda ]; then
  miniature=() cpu=() size=big tokens=4096 few=60 many=4000 seeds='1 2 3'
  checked=(--dtypes bfloat16 float16)
else
  miniature=(--miniature --rounds 1) cpu=(--gpus 0) size=tiny tokens=256 few=3 many=3 seeds=1 checked=()
fi
fixed=("train.max_update=$many" train.max_epoch=null train.flags.patience=null)

# 0. A decoding step of each attention, eager and as a CUDA graph, and of transformers' Llama.
benchmark 300 decoding_step
# 1. Nine minutes that say what bounds a user: updates eager, compiled and as graphs, each with its JSON.
whole=$deadline
[ $deadline -lt $((SECONDS + longest)) ] || deadline=$((SECONDS + longest))
for part in eager:60 profile:20 compiled:270 graph:30 overhead:60; do # seconds on an H200
  step "benchmark-host-${part%:*}" "${part#*:}" "$python" benchmarks/host.py --device "$device" --steps "${part%:*}" \
    --output "$output/benchmarks" "${miniature[@]}"
done
step benchmark-training-compiled 90 "$python" benchmarks/training.py --device "$device" --compiled \
  --output "$output/benchmarks" "${miniature[@]}"
deadline=$whole
# 2. Right? Every tile configuration; `auto` takes the kernels in what follows because of it.
step kernels-validate 30 "$python" -m moa_fairseq.layers.experts.validate --device "$device" "${checked[@]}"
# 3. Fast? By replayed graphs; with the profile of one step.
benchmark 90 attention
benchmark 45 sdpa
benchmark 120 kernels
# 4. Does it hold? Fixed updates, side by side: small models leave most of a GPU to each other.
if [ -n "$multi30k" ]; then
  step multi30k-data 60 "$python" -m moa_fairseq.cli recipe multi30k_ende_transformer_tiny \
    --data "$multi30k" --save-dir "$scratch/multi30k-data" --stage prepare
  for model in transformer_tiny moa_tiny moa_tiny_4k4e64d moa_tiny_release; do
    for seed in $seeds; do
      train "multi30k-$model-$seed" "multi30k_ende_$model" "$multi30k" "${fixed[@]}" "train.seed=$seed"
    done
  done
  gather
fi
# 5. Whole models beside fairseq's dense ones.
benchmark 90 training
benchmark 90 generation
updates $([ "$device" = cuda ] && echo --bf16 || echo --amp --cpu)
# 6. The rest.
benchmark 120 language_models
benchmark 90 training --dtype amp
benchmark 90 coordinate_descent
if [ "$device" = cuda ]; then
  for precision in --fp16 --amp; do updates $precision; done
  benchmark 90 training --dtype float16
  step kernels-validate-float32 120 "$python" -m moa_fairseq.layers.experts.validate --dtypes float32
  step kernels-tests 240 env -u TRITON_STORE_BINARY_ONLY -u TRITON_DISABLE_LINE_INFO TRITON_CACHE_DIR="$scratch/triton" \
    "$python" -m pytest -q -p no:cacheprovider tests/layers/experts
fi
if [ -n "$wikitext" ]; then
  for row in transformer moa_8k8e128d moa_8k8e256d moa_8k16e256d moa_8k32e256d moa_8k64e256d; do
    train "table2-$row" "wikitext103_mlm_$row" "$wikitext" \
      "train.max_update=$((many / 2 + 1))" train.max_epoch=null average=null train.flags.warmup-updates=200
    gather
  done
fi

echo "results: $output ($(du -sh "$output" | cut -f1)): benchmarks, measured, steps (logs), cache"
ls "$output/steps" | sed -n 's/\.done$//p' | sed 's/^/  done: /'
[ ${#unfinished[@]} -eq 0 ] || echo "  not finished: ${unfinished[*]}; run the same line again"
[ ${#failed[@]} -eq 0 ] || { echo "gpu_check.sh: failed: ${failed[*]}" >&2; exit 1; }
