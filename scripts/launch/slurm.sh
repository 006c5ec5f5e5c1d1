#!/usr/bin/env bash
# Trains a recipe in one Slurm job, on one machine or several, with the paper's effective batch:
#
#   sbatch --nodes 4 --gpus-per-node 8 scripts/launch/slurm.sh wmt14_ende_moa_big --data DIR
#   sbatch --nodes 1 --gpus-per-node 1 scripts/launch/slurm.sh wmt14_ende_moa_base --data DIR
#
# Run it in the root of this repository, on a file system that all machines share. One task per machine;
# fairseq starts a process per GPU. The log of the job tells the stages, slurm-JOB-TASK.log in the run folder what
# each task says. Five minutes before the time limit, and on SIGTERM, the training saves a checkpoint and ends; at
# the time limit, and when a process or a machine fails, the job is requeued and goes on from its last whole
# checkpoint; after four failures without a new one it ends. A crash loses what was done since the last checkpoint.
# One is written per epoch; more often, without another experiment, with:
#   --set train.flags.save-interval-updates=500 --set train.flags.keep-interval-updates=2
# (not where the recipe averages such checkpoints itself). A job has its machines' whole memory; where it has only
# some of their GPUs, say how much it needs (--mem 32G). Options of sbatch on its command line go over these:
#SBATCH --job-name=moa_fairseq
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail
# Slurm runs a copy of this file: the repository is where sbatch was called.
launch="${MOA_FAIRSEQ_ROOT:-${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}}/scripts/launch"
[ -f "$launch/_launch.sh" ] || { echo "slurm.sh: error: call sbatch in the root of the repository, or set MOA_FAIRSEQ_ROOT" >&2; exit 2; }
source "$launch/_launch.sh"
[ -n "${SLURM_JOB_ID:-}" ] || fail "this is a Slurm job script: sbatch $0 $experiment_name ..."

run() { exec "$python" -m moa_fairseq.cli recipe "$config" "$@"; }   # a process of its own, which gets our signals
requeue() {
  scontrol requeue "$SLURM_JOB_ID" || fail "this cluster does not requeue jobs: submit the same line again to go on"
  exit 0
}
child=
stop() {   # USR1: time is almost up; TERM: somebody ends the job
  trap '' USR1 TERM
  echo "$launch_name: SIG$1: what is at work is told to save and end"
  if [ -n "$child" ] && kill -TERM "$child" 2>/dev/null; then wait "$child" || true; fi
  [ "$1" = USR1 ] || exit 143
  echo "$launch_name: time is almost up; job $SLURM_JOB_ID goes back into the queue"
  requeue
}
trap 'stop USR1' USR1
trap 'stop TERM' TERM
await() { "$@" & child=$!; wait "$child"; }   # a trap runs while bash waits, not while a program is in its foreground
failed() {   # a crash: try again, unless it is the fourth without a new checkpoint
  local crashes="$save_dir/slurm-$SLURM_JOB_ID.crashes"
  [ "$save_dir/checkpoints/checkpoint_last.pt" -nt "$crashes" ] && : > "$crashes"
  echo "status $1" >> "$crashes"
  [ "$(wc -l < "$crashes")" -le 3 ] || fail "four failures without a new checkpoint in between; see $save_dir/*.log"
  echo "$launch_name: the training failed (status $1, see $save_dir/*.log); job $SLURM_JOB_ID goes back into the queue"
  requeue
}

# A requeued job goes on: it must not move aside what it trained before.
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && restart=()
await prepare
master="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER="$master:$((10000 + SLURM_JOB_ID % 50000))" SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
export python config
export -f run
logs=(--output="$save_dir/slurm-%j-%t.log" --open-mode=append)
await srun --ntasks-per-node=1 --kill-on-bad-exit=1 "${logs[@]}" \
  bash -c 'run "$@" --stage train --nodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --master "$MASTER"' \
  train ${options[@]+"${options[@]}"} || failed $?
await srun --nodes=1 --ntasks=1 bash -c 'run "$@"' finish ${options[@]+"${options[@]}"} ${record[@]+"${record[@]}"}
