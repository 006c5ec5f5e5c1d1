"""Which processes train together: one machine, several of them, or the processes of a torchrun.

A process here is one GPU, or one machine's CPU. Everything is said to fairseq-train by its own flags, so
that a printed command works without this program.
"""

from __future__ import annotations

import dataclasses
import os
import re
from typing import Any, Dict, Mapping, Optional

from moa_fairseq.errors import UserError

DEFAULT_PORT = 29500
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True)
class World:
    """Several machines (or torchrun's processes) that train one model.

    size: processes of all machines together. rank: number of this machine's first process, 0 on the
    machine that keeps the run folder. here: how many of them this program starts. init_method: where they
    meet, as torch.distributed wants it. spawn: whether fairseq-train makes the processes here out of one.
    device: the GPU of a process that fairseq-train does not spawn.
    """

    size: int
    rank: int
    here: int
    init_method: str
    spawn: bool
    device: Optional[int] = None

    def describe(self) -> str:
        """One line for the log."""
        return f"process {self.rank} of {self.size}, meeting at {self.init_method}"

    def flags(self) -> Dict[str, Any]:
        """The flags of fairseq-train that make it one of this world's processes."""
        return {
            "distributed-world-size": self.size,
            "distributed-rank": self.rank,
            "distributed-init-method": self.init_method,
            "distributed-no-spawn": not self.spawn,
            "device-id": self.device,
        }


def find_world(
    gpus: int,
    nodes: Optional[int] = None,
    node_rank: Optional[int] = None,
    master: Optional[str] = None,
    environment: Mapping[str, str] = os.environ,
) -> Optional[World]:
    """The world of this program, or None where it trains alone on one machine.

    gpus: on each machine, 0 for its CPU. nodes, node_rank, master: what the command line says (number of
    machines, this one's number, HOST or HOST:PORT of number 0). Without them, torchrun's environment
    variables count. Raises UserError where they contradict each other.
    """
    if nodes is None and node_rank is None and master is None:
        return _of_torchrun(gpus, environment) or _of_slurm(gpus, environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        raise UserError("torchrun knows --nodes, --node-rank and --master: leave them out under torchrun.")
    nodes, node_rank = nodes or 1, node_rank or 0
    if not 0 <= node_rank < nodes:
        raise UserError(
            f"--node-rank {node_rank}: {nodes} machine(s) have the numbers 0 to {nodes - 1} (--nodes)."
        )
    if master is None and nodes > 1:
        raise UserError(
            "--nodes needs --master HOST[:PORT]: the machine with --node-rank 0, as the others reach it."
        )
    if max(1, gpus) * nodes == 1:
        return None
    here = max(1, gpus)
    return World(here * nodes, here * node_rank, here, _address(master or "127.0.0.1"), spawn=gpus > 0)


def _address(master: str) -> str:
    """tcp://HOST:PORT; a port must be the same on all machines, so it is never chosen at random."""
    match = re.fullmatch(r"(?:tcp://)?(\[[0-9a-fA-F:]+\]|[^\s:/]+)(?::(\d+))?", master)
    if not match or not 0 < int(match.group(2) or DEFAULT_PORT) < 65536:
        raise UserError(f"--master {master}: write HOST or HOST:PORT, for example --master node01:29500.")
    return f"tcp://{match.group(1)}:{match.group(2) or DEFAULT_PORT}"


def _of_torchrun(gpus: int, environment: Mapping[str, str]) -> Optional[World]:
    if not all(name in environment for name in _TORCHRUN) or int(environment["WORLD_SIZE"]) == 1:
        return None
    local, rank = int(environment["LOCAL_RANK"]), int(environment["RANK"])
    here = int(environment["LOCAL_WORLD_SIZE"])
    if gpus and here > gpus:
        raise UserError(
            f"torchrun started {here} processes on this machine for {gpus} GPU(s): --nproc-per-node {gpus}."
        )
    device = local if gpus else None
    return World(int(environment["WORLD_SIZE"]), rank, 1, "env://", spawn=False, device=device)


def _of_slurm(gpus: int, environment: Mapping[str, str]) -> Optional[World]:
    """Several GPUs of one machine inside of a Slurm job.

    Left alone, fairseq would take the job's other machines and tasks, whatever they are for, for processes
    of this training.
    """
    job = environment.get("SLURM_JOB_ID", "")
    if gpus < 2 or not job.isdigit():
        return None
    return World(gpus, 0, gpus, f"tcp://127.0.0.1:{10_000 + int(job) % 50_000}", spawn=True)
