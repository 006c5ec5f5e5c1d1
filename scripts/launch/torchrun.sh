#!/usr/bin/env bash
# Trains a recipe under torchrun, which starts all processes again when one of them dies (elastic restart).
#
# One machine, a process per GPU; prepares before and scores after:
#   bash scripts/launch/torchrun.sh wmt14_ende_moa_base --data DIR
# Between 2 and 4 machines that may come and go; only the training, the same line on each of them:
#   bash scripts/launch/torchrun.sh wmt14_ende_moa_base -- --nnodes 2:4 --nproc-per-node 8 \
#       --rdzv-backend c10d --rdzv-endpoint node0:29400 --rdzv-id wmt14 --max-restarts 10
#   (first on one machine: bash scripts/wmt14_ende_moa_base.sh --data DIR --stage prepare; last: without --stage)
#
# Options of `moa-fairseq recipe` stand before the --, options of torchrun behind it. Every restart goes on from
# the last whole checkpoint and computes --update-freq anew, so that an update keeps the paper's tokens on
# whatever number of GPUs is left; the place in the epoch is kept.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"

# Without this, processes that torch 2.13 starts again look for each other where the dead ones were.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
case " ${engine_options[*]-} " in
  *" --rdzv"* | *" --nnodes"* | *" --node"*) alone= ;;
  *) alone=1 ;;
esac
case " ${engine_options[*]-} " in
  *" --nproc"*) ;;
  *)
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' \
      || fail "torch sees no GPU. Give the number of processes: bash $0 $experiment_name --gpus 0 -- --nproc-per-node 2"
    engine_options+=(--nproc-per-node gpu)
    ;;
esac
case " ${engine_options[*]-} " in *" --max-restarts"*) ;; *) engine_options+=(--max-restarts 3) ;; esac
[ -z "$alone" ] || engine_options+=(--standalone)

[ -z "$alone" ] || prepare
"$python" -m torch.distributed.run "${engine_options[@]}" -m moa_fairseq.cli recipe "$config" \
  ${options[@]+"${options[@]}"} --stage train
[ -z "$alone" ] || finish
