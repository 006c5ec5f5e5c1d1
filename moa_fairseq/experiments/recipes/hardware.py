"""The devices of a training, of one machine or of several that train together.

A process here is one GPU, or one machine's CPU. fairseq-train gets everything by its own flags, so
that a printed command works without this program.
"""

import contextlib
import dataclasses
import os
import platform
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from moa_fairseq.errors import UserError

DEFAULT_PORT = 29500
_TORCHRUN = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Device(NamedTuple):
    """A GPU's data sheet.

    Args:
        capability: CUDA's compute capability, (major, minor).
        memory: the size of its memory in bytes.
        peak_half, peak_single: the peak number of operations per second in fp16 or bf16, and in fp32.
        counts: the numbers of such GPUs that --plan shows by default.
    """

    capability: tuple[int, int]
    memory: int
    peak_half: float
    peak_single: float
    counts: tuple[int, ...] = (1, 8, 32)


# Values of --device-name. NVIDIA's data sheets of the SXM modules and white papers of the GeForce cards
# (with sums in fp32), without sparsity.
DEVICES = {
    "V100": Device((7, 0), 32_000_000_000, 125e12, 15.7e12),
    "A100": Device((8, 0), 80_000_000_000, 312e12, 19.5e12),
    "H100": Device((9, 0), 80_000_000_000, 989e12, 67e12),
    "H200": Device((9, 0), 141_000_000_000, 989e12, 67e12),
    "RTX3090": Device((8, 6), 24_000_000_000, 71e12, 35.6e12, (1,)),
    "RTX4090": Device((8, 9), 24_000_000_000, 165.2e12, 82.6e12, (1,)),
    "RTX5090": Device((12, 0), 32_000_000_000, 209.5e12, 104.8e12, (1,)),
}

# torch's name of a card → its key in DEVICES. Any other card is unknown, even if its name is similar.
_KINDS = {
    "Tesla V100-SXM2-32GB": "V100",
    "Tesla V100-SXM3-32GB": "V100",
    "Tesla V100-PCIE-32GB": "V100",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100 80GB PCIe": "A100",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA GeForce RTX 3090": "RTX3090",
    "NVIDIA GeForce RTX 4090": "RTX4090",
    "NVIDIA GeForce RTX 5090": "RTX5090",
}


def device_kind(name: str) -> str:
    """The key of DEVICES for a GPU of this name, which may be the key itself; else "unknown"."""
    return name if name in DEVICES else _KINDS.get(name, "unknown")


@dataclasses.dataclass(frozen=True)
class World:
    """Several machines (or torchrun's processes) that train one model.

    Args:
        size: the number of processes of all machines together.
        rank: the number of this machine's first process; 0 on the machine that writes the run folder.
        local_size: the number of processes that this program starts.
        init_method: the address at which the processes meet, for torch.distributed.
        spawn: whether fairseq-train starts the processes of this machine itself.
        device: the number of the GPU of a process that fairseq-train does not start itself.
    """

    size: int
    rank: int
    local_size: int
    init_method: str
    spawn: bool
    device: int | None = None

    def flags(self) -> dict[str, Any]:
        """The flags of fairseq-train that make it one of this world's processes."""
        return {
            "distributed-world-size": self.size,
            "distributed-rank": self.rank,
            "distributed-init-method": self.init_method,
            "distributed-no-spawn": not self.spawn,
            "device-id": self.device,
        }


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The devices of one run.

    Args:
        gpus: the number of this machine's GPUs to use; 0 means the CPU.
        name: the name of the GPU or CPU, for people.
        capability: CUDA's compute capability, (major, minor), of the least capable GPU.
        visible: the numbers of all GPUs visible to torch; the first `gpus` of them are used.
        world: the other machines or processes of the same training, or None.
        bfloat16_units: whether the CPU has units for bfloat16 products (AMX or AVX512-BF16).
    """

    gpus: int = 0
    name: str = "CPU"
    capability: tuple[int, int] | None = None
    visible: tuple[str, ...] = ()
    world: World | None = None
    bfloat16_units: bool = False

    @property
    def devices(self) -> int:
        """The number of processes that train together: one per GPU, or one on each machine's CPU."""
        if self.world:
            return self.world.size
        return max(1, self.gpus)

    @property
    def is_main_process(self) -> bool:
        """True for the one program of a training that writes the run folder."""
        return self.world is None or self.world.rank == 0

    @property
    def shared(self) -> bool:
        """True if other programs start some of the processes."""
        return self.world is not None and self.world.size > self.world.local_size

    def with_devices(self, count: int) -> "Hardware":
        """The first `count` devices, of a training that no other program shares."""
        world = None
        if self.world and count > 1:
            world = dataclasses.replace(self.world, size=count, local_size=count)
        return dataclasses.replace(self, gpus=count, world=world)

    @property
    def environment(self) -> dict[str, str]:
        """CUDA_VISIBLE_DEVICES if a run uses fewer GPUs than torch sees."""
        used = self.visible[: self.gpus]
        if 0 < len(used) < len(self.visible):
            return {"CUDA_VISIBLE_DEVICES": ",".join(used)}
        return {}

    def describe(self) -> str:
        """The hardware in logs and result.json: '2 x NVIDIA A100', or the CPU and its number of cores.

        Processes of a world may share one machine's CPU, so their number does not multiply its cores.
        """
        if self.gpus:
            return f"{self.devices} x {self.name}"
        if self.world:
            return f"{self.devices} processes, {self.name} on each machine"
        return self.name


def detect_hardware() -> Hardware:
    """The GPUs that torch sees (CUDA_VISIBLE_DEVICES respected), else the CPU."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        return _cpu(f"{cores} CPU cores")
    devices = range(count)
    capability = min(map(torch.cuda.get_device_capability, devices))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    identifiers = visible.split(",") if visible else list(map(str, devices))
    names = dict.fromkeys(map(torch.cuda.get_device_name, devices))
    return Hardware(count, " or ".join(names), capability, tuple(identifiers[:count]))


def assumed_hardware(device_name: str, gpus: int | None) -> Hardware:
    """GPUs of a given type, for --dry-run and --plan without them.

    Args:
        device_name: a key of DEVICES.
        gpus: the number of GPUs (default: 1).

    Raises:
        UserError: for a number below 1.
    """
    count = 1 if gpus is None else gpus
    if count < 1:
        raise UserError(f"--gpus {count} --device-name {device_name} needs at least one GPU.")
    visible = tuple(map(str, range(count)))
    return Hardware(count, device_name, DEVICES[device_name].capability, visible)


def choose_devices(present: Hardware, requested: int | None, dry_run: bool) -> Hardware:
    """Apply --gpus N to the machine.

    Args:
        present: this machine's hardware.
        requested: the number N; None for all GPUs, 0 for the CPU.
        dry_run: True to assume V100s, whose precision is fp16, if N is larger than the number of GPUs.

    Raises:
        UserError: for more GPUs than present, except in a dry run, and for a negative number.
    """
    if requested is None or requested == present.gpus:
        return present
    if requested < 0:
        raise UserError(f"--gpus {requested}: give the number of GPUs to use; 0 means the CPU.")
    if requested == 0:
        return _cpu("CPU")
    if requested < present.gpus:
        return dataclasses.replace(present, gpus=requested)
    if dry_run:
        return dataclasses.replace(assumed_hardware("V100", requested), name="GPU (assumed V100)")
    raise UserError(
        f"--gpus {requested}: torch sees {present.gpus} GPU(s) here. Use --gpus {present.gpus}, or check "
        "CUDA_VISIBLE_DEVICES, torch's build and the CUDA driver."
    )


def find_world(
    gpus: int,
    nodes: int | None = None,
    node_rank: int | None = None,
    master: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> World | None:
    """The world of this program, or None if it trains alone on one machine.

    Without nodes, node_rank and master, torchrun's environment variables are used; in a job of Slurm, several
    GPUs form a separate world, so that fairseq leaves the job's other machines alone.

    Args:
        gpus: the number of GPUs on each machine; 0 for its CPU.
        nodes: the number of machines.
        node_rank: the number of this machine, from 0.
        master: HOST or HOST:PORT of machine 0.
        environment: the environment variables.

    Raises:
        UserError: if these contradict each other, or a number or address is invalid.
    """
    if nodes is None and node_rank is None and master is None:
        return _world_of_a_job(gpus, environment)
    if "TORCHELASTIC_RUN_ID" in environment:
        raise UserError(
            "torchrun sets --nodes, --node-rank and --master: leave them out under torchrun."
        )
    nodes = nodes or 1
    node_rank = node_rank or 0
    local_size = max(1, gpus)
    if not 0 <= node_rank < nodes:
        raise UserError(
            f"--node-rank {node_rank} is out of range: the numbers of {nodes} machine(s) are 0 to "
            f"{nodes - 1} (--nodes)."
        )
    if master is None and nodes > 1:
        raise UserError(
            "--nodes needs --master HOST[:PORT], the address of the machine with --node-rank 0."
        )
    if local_size * nodes == 1:
        return None
    return World(
        size=local_size * nodes,
        rank=local_size * node_rank,
        local_size=local_size,
        init_method=_meeting_address(master or "127.0.0.1"),
        spawn=gpus > 0,
    )


def _meeting_address(master: str) -> str:
    """HOST[:PORT] → tcp://HOST:PORT. All machines must know the port, so its default is fixed."""
    address = re.fullmatch(r"(?:tcp://)?(\[[0-9a-fA-F:]+\]|[^\s:/]+)(?::(\d+))?", master)
    port = int(address.group(2) or DEFAULT_PORT) if address else 0
    if not address or not 0 < port < 65536:
        raise UserError(
            f"--master {master}: give HOST or HOST:PORT, for example --master node01:29500."
        )
    return f"tcp://{address.group(1)}:{port}"


def _world_of_a_job(gpus: int, environment: Mapping[str, str]) -> World | None:
    """The world by torchrun's or Slurm's environment variables; None without them."""
    if environment.keys() >= set(_TORCHRUN) and int(environment["WORLD_SIZE"]) > 1:
        size, rank, local, local_size = (int(environment[name]) for name in _TORCHRUN[:4])
        if gpus and local_size > gpus:
            raise UserError(
                f"torchrun started {local_size} processes on this machine for {gpus} GPU(s). Start it with "
                f"--nproc-per-node {gpus}."
            )
        device = local if gpus else None
        return World(size, rank, local_size=1, init_method="env://", spawn=False, device=device)
    job = environment.get("SLURM_JOB_ID", "")
    if gpus < 2 or not job.isdigit():
        return None
    # Without a world of its own, fairseq would take all other machines and tasks of the job for processes of
    # this training
    address = f"tcp://127.0.0.1:{10_000 + int(job) % 50_000}"
    return World(gpus, rank=0, local_size=gpus, init_method=address, spawn=True)


def _cpu(label: str) -> Hardware:
    """This machine's CPU, whose name for people begins with a label such as "8 CPU cores"."""
    facts: dict[str, str] = {}
    # The file exists only on Linux; the name of the processor is for people
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    model = facts.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in facts:  # clouds call processors of several years "AMD EPYC"
        model += f", family {facts['cpu family']} model {facts['model']}"
    units = {"amx_bf16", "avx512_bf16"}.intersection(facts.get("flags", "").split())
    return Hardware(name=f"{label} ({model})", bfloat16_units=bool(units))
