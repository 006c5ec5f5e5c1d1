"""Memory of a training's parameters, and disk space of its checkpoints.

Bytes per parameter, with Adam's 8 (other optimizers: OPTIMIZER_BYTES):

    fp32, amp                 4 weight + 4 gradient + 8 Adam; amp + 2                              = 16, 18
    fp16, bf16                2 weight + 2 gradient + 4 master + 4 its gradient + 8 Adam           = 20
    several GPUs              + one gradient, for the buckets in which gradients are summed over GPUs
"""

import math

from torch import nn

from moa_fairseq.experiments.recipes.schema import Recipe
from moa_fairseq.experiments.records.json_files import Values

# Per parameter; other optimizers have Adam's 8
OPTIMIZER_BYTES = {"nag": 4, "sgd": 4, "adagrad": 4}


def parameter_bytes(flags: Values, precision: str, devices: int) -> int:
    """Bytes per parameter that training keeps on each device.

    Args:
        flags: the flags of fairseq-train; optimizer, sharding and memory-efficient-* are read.
        precision: see `precision_name`.
        devices: the number of devices that train together.
    """
    is_half = precision in ("fp16", "bf16")
    weight = gradient = 2 if is_half else 4
    optimizer = _optimizer_bytes(flags)
    bytes_each = weight + gradient + optimizer
    if precision == "amp":
        bytes_each += 2  # the weight in half precision
    if is_half and not (flags.get("memory-efficient-fp16") or flags.get("memory-efficient-bf16")):
        bytes_each += 8  # the weight and its gradient in fp32
    if flags.get("ddp-backend") == "fully_sharded":
        return math.ceil(bytes_each / devices)
    if flags.get("zero-sharding") == "os":
        bytes_each -= optimizer - optimizer // devices
    return bytes_each + (gradient if devices > 1 else 0)


def _optimizer_bytes(flags: Values) -> int:
    """Bytes of the optimizer's state per parameter; most have Adam's two numbers in fp32."""
    return OPTIMIZER_BYTES.get(str(flags.get("optimizer")), 8)


def disk(
    recipe: Recipe, model: nn.Module, on_gpu: bool, updates: int | None, epochs: int | None
) -> dict[str, int | None]:
    """Disk space of the checkpoints and the average that a training leaves, as fairseq writes them.

    A checkpoint has the weights and the optimizer's state, in fp32 for any precision. A tied
    weight is stored once per name if it comes from a GPU.

    Args:
        recipe: the training; its flags are read, and whether it has an average.
        model: the model on any device, because only shapes are read.
        on_gpu: whether the model is trained on a GPU.
        updates, epochs: the numbers of updates and of complete epochs of the training, None if unknown.

    Returns:
        "checkpoint": the bytes of one file (while a checkpoint is written there are two more files); "files":
        the number of files that stay; "total": the bytes of all of them. The last two are None if nothing
        limits the number of files.
    """
    flags = recipe.training_flags
    parameters = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    weights = 0
    for name, values in model.state_dict().items():
        if on_gpu or name not in tied:
            weights += values.numel() * values.element_size()
    size = weights * (2 if flags.get("store-ema") else 1)
    if not flags.get("no-save-optimizer-state"):
        size += _optimizer_bytes(flags) * sum(map(nn.Parameter.numel, parameters.values()))
    checkpoints = _number_of_checkpoints(recipe, updates, epochs)
    if checkpoints == math.inf:
        return {"checkpoint": size, "files": None, "total": None}
    total = int(checkpoints) * size + (weights if recipe.average else 0)
    return {"checkpoint": size, "files": int(checkpoints), "total": total}


def _number_of_checkpoints(recipe: Recipe, updates: int | None, epochs: int | None) -> float:
    """The number of checkpoints that stay; infinity if nothing limits it."""
    flags = recipe.training_flags
    if recipe.finetune == "noft" or flags.get("no-save"):
        return 0
    checkpoints = 1.0  # checkpoint_last.pt
    if not flags.get("disable-validation"):
        checkpoints += 1 + flags.get("keep-best-checkpoints", 0)
    if not flags.get("no-epoch-checkpoints"):
        saved = math.inf if epochs is None else epochs // flags.get("save-interval", 1)
        checkpoints += min(saved, recipe.train.keep_last_epochs)
    if interval := flags.get("save-interval-updates"):
        saved = math.inf if updates is None else updates // interval
        keep = flags.get("keep-interval-updates", -1)
        checkpoints += min(saved, keep) if keep > 0 else saved
    return checkpoints
