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
_TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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
        return _world_around(gpus, environment)
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
    here = max(1, gpus)
    if here * nodes == 1:
        return None
    # A port must be the same on all machines, so it is never chosen at random.
    address = re.fullmatch(r"(?:tcp://)?(\[[0-9a-fA-F:]+\]|[^\s:/]+)(?::(\d+))?", master or "127.0.0.1")
    port = int(address.group(2) or DEFAULT_PORT) if address else 0
    if not address or not 0 < port < 65536:
        raise UserError(f"--master {master}: write HOST or HOST:PORT, for example --master node01:29500.")
    meeting = f"tcp://{address.group(1)}:{port}"
    return World(here * nodes, here * node_rank, here, meeting, spawn=gpus > 0)


def _world_around(gpus: int, environment: Mapping[str, str]) -> Optional[World]:
    """The world that torchrun has made, or several GPUs of one machine inside of a Slurm job."""
    if all(name in environment for name in _TORCHRUN) and int(environment["WORLD_SIZE"]) > 1:
        size, rank, local, here = (int(environment[name]) for name in _TORCHRUN[:4])
        if gpus and here > gpus:
            raise UserError(
                f"torchrun started {here} processes on this machine for {gpus} GPU(s): "
                f"--nproc-per-node {gpus}."
            )
        return World(size, rank, 1, "env://", spawn=False, device=local if gpus else None)
    job = environment.get("SLURM_JOB_ID", "")
    if gpus < 2 or not job.isdigit():
        return None
    # Left alone, fairseq would take the job's other machines and tasks, whatever they are for, for processes
    # of this training.
    return World(gpus, 0, gpus, f"tcp://127.0.0.1:{10_000 + int(job) % 50_000}", spawn=True)
