#!/usr/bin/env bash
# Trains a recipe in one Slurm job, on one machine or several, with the paper's effective batch:
#
#   sbatch --nodes 4 --gpus-per-node 8 scripts/launch/slurm.sh wmt14_ende_moa_big --data DIR
#   sbatch --nodes 1 --gpus-per-node 1 scripts/launch/slurm.sh wmt14_ende_moa_base --data DIR
#
# Run it in the root of this repository, on a file system that all machines share. One task per machine;
# fairseq starts a process per GPU. Five minutes before the time limit, and when a machine fails, the job
# is requeued and goes on from its last whole checkpoint. One is written per epoch; more often, without
# another experiment, with: --set train.flags.save-interval-updates=500
#   --set train.flags.keep-interval-updates=2
# (not where the recipe averages such checkpoints itself). Options of sbatch on its command line go over these:
#SBATCH --job-name=moa_fairseq
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
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

requeue() {
  echo "$launch_name: time is almost up; job $SLURM_JOB_ID goes back into the queue"
  scontrol requeue "$SLURM_JOB_ID" || fail "this cluster does not requeue jobs: submit the same line again to go on"
  exit 0
}
trap requeue USR1
await() { "$@" & wait $!; }   # a trap runs while bash waits, not while a program is in its foreground

# A requeued job goes on: it must not move aside what it trained before.
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && restart=()
await prepare
master="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export MASTER="$master:$((10000 + SLURM_JOB_ID % 50000))" SRUN_CPUS_PER_TASK="${SLURM_CPUS_PER_TASK:-1}"
export python config
export -f run
await srun --ntasks-per-node=1 --kill-on-bad-exit=1 \
  bash -c 'run "$@" --stage train --nodes "$SLURM_NNODES" --node-rank "$SLURM_NODEID" --master "$MASTER"' \
  train ${options[@]+"${options[@]}"}
await srun --nodes=1 --ntasks=1 bash -c 'run "$@"' finish ${options[@]+"${options[@]}"} ${record[@]+"${record[@]}"}
