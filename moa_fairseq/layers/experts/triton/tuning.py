"""The small space of tile sizes that Triton chooses from, and what a GPU has room for.

A choice is made once per weight shape, dtype and class of rows per expert (not per batch size), by timing
the few configurations that are left after pruning; where Triton offers it (`cache_results`), the outcome is
kept on disk beside the compiled kernels. Under the interpreter there is nothing to time: one small one.
"""

import inspect
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
ROW_CLASSES = (16, 64, 128)

# shared memory that one block can have, in KiB, by compute capability
_SHARED_KIB = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227}
_OTHER_SHARED_KIB = 99  # 8.6, 8.9, 12.0
_SLACK = 1024  # bytes per stage for indices and barriers


@cache
def rows_class(rows: int, num_experts: int) -> int:
    """The class of `rows` spread over the experts: enough to choose a tile height, stable between batches.

    Args:
        rows: of all experts.
        num_experts: E.

    Returns:
        The least of ROW_CLASSES that is no less than the average, or the last.
    """
    average = rows // max(1, num_experts)
    return next((size for size in ROW_CLASSES if average <= size), ROW_CLASSES[-1])


def shared_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a block may use on a GPU of this compute capability (major, minor)."""
    return 1024 * _SHARED_KIB.get(capability, _OTHER_SHARED_KIB)


@cache
def _limit_of(device: torch.device) -> int:
    if torch.version.hip is not None or device.type != "cuda":
        return 64 * 1024
    return shared_limit(torch.cuda.get_device_capability(device))


def _configs(names: str, *choices: tuple[int, ...]) -> list[triton.Config]:
    keys = names.split()
    return [
        triton.Config(dict(zip(keys, sizes)), num_warps=warps, num_stages=stages)
        for *sizes, warps, stages in choices
    ]


def _mend_interpreter() -> None:
    """Let a kernel's scalar argument bound a loop under the interpreter, as it does on a GPU.

    The interpreter holds a scalar as an array of one element. Up to Triton 3.6 it gives that to `int`, which
    NumPy ≥ 2.4 refuses; later ones squeeze it first, as here.
    """
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if patch is None:
        return

    def patch_and_squeeze(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.squeeze())

    interpreter._patch_lang_tensor = patch_and_squeeze


if INTERPRETED:
    _mend_interpreter()
    rows_configs = _configs("BLOCK_M BLOCK_N BLOCK_K", (16, 32, 16, 4, 1))
    outer_configs = _configs("BLOCK_D BLOCK_C BLOCK_R", (16, 32, 16, 4, 1))
else:
    rows_configs = _configs(
        "BLOCK_M BLOCK_N BLOCK_K",
        (16, 64, 64, 4, 3),
        (16, 128, 64, 4, 3),
        (32, 64, 64, 4, 3),
        (32, 128, 64, 4, 3),
        (64, 64, 32, 4, 2),
        (64, 64, 64, 4, 4),
        (64, 128, 64, 4, 3),
        (128, 64, 64, 4, 3),
        (128, 128, 32, 4, 4),
        (128, 128, 64, 4, 3),
        (128, 128, 64, 8, 3),
        (128, 256, 64, 8, 3),
    )
    # rows are found through `order`, and Triton spreads its stages over both loads: only from five stages
    # on do the loads of one step overlap the product of the step before
    outer_configs = _configs(
        "BLOCK_D BLOCK_C BLOCK_R",
        (64, 64, 32, 4, 2),
        (64, 64, 64, 4, 5),
        (64, 128, 64, 4, 5),
        (128, 128, 32, 4, 7),
        (128, 128, 64, 4, 5),
        (128, 128, 64, 8, 5),
        (128, 256, 64, 8, 5),
    )
# The gate kernel uses its product three times when the loop is over. With more than one matrix instruction's
# 16 rows per warp, or with 256 columns, it would spill registers.
gate_configs = [
    config
    for config in rows_configs
    if config.kwargs["BLOCK_M"] <= 16 * config.num_warps and config.kwargs["BLOCK_N"] <= 128
]


def shared_bytes(config: triton.Config, element_size: int) -> int:
    """Upper bound of the shared memory of the tiles that a configuration keeps in flight, in bytes.

    Args:
        config: of one of this module's lists.
        element_size: bytes of a number.
    """
    sizes: dict[str, int] = config.kwargs
    in_flight: int = config.num_stages
    if "BLOCK_R" in sizes:
        elements = sizes["BLOCK_R"] * (sizes["BLOCK_D"] + sizes["BLOCK_C"])
        in_flight = 1 + max(1, (in_flight - 1) // 2)
    else:
        elements = sizes["BLOCK_K"] * (sizes["BLOCK_M"] + sizes["BLOCK_N"])
    return in_flight * (elements * element_size + _SLACK)


def fitting(configs: list[triton.Config], sample: torch.Tensor, tf32: bool) -> list[triton.Config]:
    """The configurations whose tiles have room on the device of `sample`; the smallest if none has.

    The smallest alone for float32 without TF32: there are no matrix instructions for it, so that larger tiles
    need more registers than there are (up to 13 KB a thread were spilled) and take the longest to compile.

    Args:
        configs: to choose from.
        sample: has the device, and the size of a number.
        tf32: a float32 product may use TF32.
    """
    if not configs:
        return []
    limit = _limit_of(sample.device)
    size = sample.element_size()
    smallest = min(configs, key=lambda config: shared_bytes(config, size))
    if size == 4 and not tf32:
        return [smallest]
    return [config for config in configs if shared_bytes(config, size) <= limit] or [smallest]


def _not_above(configs: list[triton.Config], name: str, size: int) -> list[triton.Config]:
    """Those whose tile is no larger than `size` needs; the smallest tiles if all are."""
    smallest = min(config.kwargs[name] for config in configs)
    needed = max(smallest, triton.next_power_of_2(size))
    return [config for config in configs if config.kwargs[name] <= needed]


def prune_rows(configs: list[triton.Config], named: dict[str, Any], **meta: Any) -> list[triton.Config]:
    """What is worth timing for rows: tiles as high as the experts have rows, no wider than the product.

    Args:
        configs: to choose from.
        named, meta: the launch's arguments by name, as Triton's autotuner gives them.
    """
    known = {**named, **meta}
    configs = fitting(configs, known["rows"], known["TF32"])
    height = known["rows_per_expert"]
    suited = [config for config in configs if height // 2 <= config.kwargs["BLOCK_M"] <= height]
    return _not_above(suited or configs, "BLOCK_N", known.get("OUTER") or known["EXPERT_DIM"])


def prune_outer(configs: list[triton.Config], named: dict[str, Any], **meta: Any) -> list[triton.Config]:
    """What is worth timing for weight gradients: tiles no larger than the weight.

    Args:
        configs: to choose from.
        named, meta: the launch's arguments by name, as Triton's autotuner gives them.
    """
    known = {**named, **meta}
    configs = _not_above(
        fitting(configs, known["left"], known["TF32"]), "BLOCK_D", known.get("EXPERT_DIM", 128)
    )
    return _not_above(configs, "BLOCK_C", known.get("MODEL_DIM", 128))


def autotune(configs: list[triton.Config], prune: Callable[..., list[triton.Config]], key: list[str]) -> Any:
    """`triton.autotune` over `configs`, its outcome cached on disk where this Triton can.

    Under the interpreter the one configuration is simply set: some autotuners ask for a GPU even then.

    Args:
        configs: to choose from; under the interpreter there is one.
        prune: leaves of them what is worth timing for a launch.
        key: names of the arguments for each of whose values the choice is made anew.

    Returns:
        A decorator of a kernel.
    """
    if INTERPRETED:
        return triton.heuristics(
            {name: lambda _, size=size: size for name, size in configs[0].kwargs.items()}
        )
    if "cache_results" in inspect.signature(triton.autotune).parameters:
        options = {"cache_results": True}
    else:
        options = {}
    return triton.autotune(configs, key, prune_configs_by={"early_config_prune": prune}, **options)
