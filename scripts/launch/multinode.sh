#!/usr/bin/env bash
# Trains a recipe on several machines without a scheduler: start it on each of them, with its number.
#
#   node0$ bash scripts/launch/multinode.sh wmt14_ende_moa_big --data DIR --nodes 2 --node-rank 0 --master node0
#   node1$ bash scripts/launch/multinode.sh wmt14_ende_moa_big --data DIR --nodes 2 --node-rank 1 --master node0
#
# The working directory must be on a file system that all machines share, and node0:29500 (another port:
# --master node0:PORT) be reachable from the others. Machine 0 prepares the data, the others wait for it; all
# train, a process per GPU, with the paper's effective batch; machine 0 averages, translates and scores.
# When a machine fails, all stop: start the same lines again, and training goes on from its last checkpoint.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"

nodes="" node_rank="" master="" others=()
set -- ${options[@]+"${options[@]}"}
while [ $# -gt 0 ]; do
  case "$1" in
    --nodes) nodes="${2:-}"; shift ;;
    --nodes=*) nodes="${1#*=}" ;;
    --node-rank) node_rank="${2:-}"; shift ;;
    --node-rank=*) node_rank="${1#*=}" ;;
    --master) master="${2:-}"; shift ;;
    --master=*) master="${1#*=}" ;;
    *) others+=("$1") ;;
  esac
  [ $# -eq 0 ] || shift
done
[ -n "$nodes" ] && [ -n "$node_rank" ] && [ -n "$master" ] || fail "say --nodes N --node-rank R --master HOST[:PORT] (--help)"
options=(${others[@]+"${others[@]}"})
join=(--nodes "$nodes" --node-rank "$node_rank" --master "$master")

if [ "$node_rank" = 0 ]; then
  prepare
  train "${join[@]}"
  finish
else
  [ ${#restart[@]} -eq 0 ] || fail "give --restart to machine 0 only, and start the others when it has prepared"
  [ -s "$save_dir/state.json" ] || echo "$launch_name: waiting for machine 0 to prepare the data (in $save_dir)"
  until [ -s "$save_dir/state.json" ]; do sleep "${MOA_FAIRSEQ_POLL_SECONDS:-5}"; done
  train "${join[@]}"
fi
