"""The numeric precision that suits the hardware, and the flags that depend on both."""

import argparse
import importlib.util

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.hardware import Hardware
from moa_fairseq.experiments.recipes.schema import Model, Recipe

# From this width on, a CPU with units for bfloat16 trains under autocast: 1.4 to 1.5 times as fast on a Xeon
# with AMX. Smaller models gain less, and their float32 is the same on CPUs without such units.
_AMP_WIDTH = 512


def precision_name(precision: str, hardware: Hardware, model: Model | None = None) -> str:
    """A recipe's `precision` as fp32, fp16, bf16 or amp.

    `auto` is bf16 from Ampere on, fp16 on Volta and Turing; on a CPU with units for bfloat16, amp for a model
    wide enough to gain from it, except with adaptive inputs, which fail under autocast; otherwise fp32.

    Args:
        precision: one of PRECISIONS of `schema`.
        hardware: the run's hardware.
        model: the recipe's section; without it `auto` means fp32 on a CPU.

    Raises:
        UserError: if the hardware or the model does not support the precision.
    """
    if precision == "auto":
        return _automatic_precision(hardware, model)
    if precision == "amp" and model and getattr(_architecture(model), "adaptive_input", False):
        raise UserError("train.precision amp fails with adaptive inputs. Use fp32, fp16 or bf16.")
    if precision in ("fp16", "bf16") and not hardware.gpus:
        raise UserError(
            f"train.precision {precision} needs a GPU. Use fp32, amp or auto on the CPU."
        )
    if precision == "bf16" and (hardware.capability or (0, 0)) < (8, 0):
        raise UserError(
            f"train.precision bf16 needs Ampere or newer, not {hardware.name}. Use fp16."
        )
    return precision


def _automatic_precision(hardware: Hardware, model: Model | None) -> str:
    """What `auto` means, see `precision_name`."""
    if hardware.gpus:
        capability = hardware.capability or (0, 0)
        if capability >= (8, 0):
            return "bf16"
        return "fp16" if capability >= (7, 0) else "fp32"
    if model is None or not hardware.bfloat16_units:
        return "fp32"
    args = _architecture(model)
    sides = ("encoder_embed_dim", "decoder_embed_dim")
    width = max(getattr(args, side, 0) or 0 for side in sides)
    gains = width >= _AMP_WIDTH and not getattr(args, "adaptive_input", False)
    return "amp" if gains else "fp32"


def _architecture(model: Model) -> argparse.Namespace:
    """The flags of a model, with those that its architecture sets."""
    from fairseq.models import ARCH_CONFIG_REGISTRY

    args = argparse.Namespace()
    for name, value in model.flags.items():
        setattr(args, name.replace("-", "_"), value)
    ARCH_CONFIG_REGISTRY.get(model.arch, lambda _: None)(args)
    return args


def check_parallel_flags(recipe: Recipe, hardware: Hardware) -> None:
    """Raise an error for settings that fairseq would reject only once every process runs.

    Args:
        recipe: the recipe.
        hardware: the run's hardware.

    Raises:
        UserError: for such a setting; the message names the flag.
    """
    flags = recipe.training_flags
    precision = precision_name(recipe.train.precision, hardware, recipe.model)
    backend = flags.get("ddp-backend")
    is_sharded = flags.get("zero-sharding") == "os"
    for half in ("fp16", "bf16"):
        if flags.get(f"memory-efficient-{half}") and precision != half:
            raise UserError(
                f"train.flags.memory-efficient-{half} needs train.precision {half}, but this run has "
                f"{precision} on {hardware.describe()}. Change one of them."
            )
    needs_fairscale = is_sharded or backend in ("fully_sharded", "slowmo")
    if needs_fairscale and importlib.util.find_spec("fairscale") is None:
        flag = "zero-sharding os" if is_sharded else f"ddp-backend {backend}"
        raise UserError(
            f"train.flags.{flag} needs the package fairscale. Run pip install fairscale, or save memory with "
            "--set train.flags.checkpoint-activations=true or a lower train.max_tokens."
        )
    is_flat = not (flags.get("fp16-no-flatten-grads") or flags.get("memory-efficient-fp16"))
    if is_sharded and precision == "fp16" and is_flat:
        raise UserError(
            "train.flags.zero-sharding os with fp16 needs --set train.flags.fp16-no-flatten-grads=true, or "
            "memory-efficient-fp16."
        )
    if backend == "fully_sharded" and precision == "bf16":
        raise UserError(
            "fairseq's fully_sharded supports fp32 and fp16 only. Add --set train.precision=fp16, or use "
            "--set train.flags.zero-sharding=os."
        )
    if hardware.world and not hardware.gpus and backend not in (None, "legacy_ddp", "no_c10d"):
        raise UserError(
            f"train.flags.ddp-backend {backend} works on GPUs only. Leave it out on the CPU."
        )
