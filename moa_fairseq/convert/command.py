"""Turn a trained Transformer of fairseq into a mixture of attention heads, or a mixture into a Transformer.

  moa-fairseq convert dense.pt --to moh --moh-shared-heads 2 --experts-per-token 1 moh.pt
  moa-fairseq convert dense.pt --to mae mae.pt                       even gates: the same outputs
  moa-fairseq convert uni_mae.pt --to dense dense.pt                 for stock fairseq and CTranslate2
  moa-fairseq convert dense.pt --to moa moa.pt --data data-bin       not exact: how the loss changes
  moa-fairseq convert model.pt --format safetensors model.safetensors

Translation, masked and causal language models. Before anything is written, both models are run in float64
on random sentences: an exact conversion must give the same outputs, or nothing is written. Where a conversion
cannot be exact, the reason is printed, and with --data the loss before and after; --to dense refuses instead.
An existing OUT is left alone without --force, and IN always. The flags of the new family are those of its
architectures. The file has no optimizer state; continue training with fairseq-train --finetune-from-model OUT
and the flags of the architecture.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import typing
from pathlib import Path
from typing import Any, Dict, Optional, Tuple

import torch
from torch import nn

import moa_fairseq  # noqa: F401  (registers the models)
from moa_fairseq.convert import weights
from moa_fairseq.convert.check import largest_difference, mean_losses
from moa_fairseq.convert.checkpoints import FORMATS, Checkpoint, read, settings_file, write
from moa_fairseq.convert.models import DENSE, as_group, build, kind_of, load, of_checkpoint, settings_for
from moa_fairseq.errors import UserError
from moa_fairseq.fairseq_patches.malformed_checkpoints import explaining
from moa_fairseq.files import refuse_overwriting
from moa_fairseq.transformer.families import FAMILIES

TARGETS = ("moh", "mae", "moa", DENSE)
_PLAIN = {"translation_bcd": "translation", "language_modeling_bcd": "language_modeling"}


@dataclasses.dataclass
class Converted:
    """A conversion's outcome. reason: why it is not exact, or None if it is exact within `difference`."""

    checkpoint: Checkpoint
    model: nn.Module
    job: str
    reason: Optional[str]
    difference: float


def convert(checkpoint: Checkpoint, source: nn.Module, family: str, given: Dict[str, Any]) -> Converted:
    """The same model with another attention.

    family: of TARGETS; given: values of its flags. source: the checkpoint's model; it stays in float64.
    Raises UserError if the conversion is impossible, or not exact where it has to be.
    """
    settings = checkpoint.settings
    origin, job = kind_of(settings)
    if origin == family:
        raise UserError(f"--to {family}: the checkpoint's model is of that family already.")
    state, reason = source.state_dict(), None
    spoiled = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if spoiled:
        raise UserError(
            f"{len(spoiled)} of the checkpoint's {len(state)} weights hold NaN or infinity, {spoiled[0]} the "
            "first: its training diverged. Convert an earlier checkpoint."
        )
    if family == DENSE:
        weights.refuse_what_fairseq_lacks(settings)
    if origin != DENSE:
        state = weights.dense_weights(source)
    values = _values(settings, family, job, given, weights.biased(state))
    target_settings = settings_for(settings, family, job, values)
    target = build(target_settings, state)
    if family == DENSE:
        load(target, state)
    else:
        reason = weights.fill(target, state, lambda model, some: load(model, some, weights.OF_ROUTING))
    target = _in_precision_of(target, checkpoint)
    result = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    result = _tied_as(target, result)
    difference = largest_difference(source, target, job, settings)
    if reason is None and not difference <= _tolerance(checkpoint):
        raise UserError(
            f"The converted model's outputs differ by {difference:.1e} of the largest, where they should be "
            "equal: nothing was written. Please report this with the architecture and its flags."
        )
    cfg = _config(checkpoint, as_group(target_settings, family, job), family)
    return Converted(Checkpoint(result, cfg, checkpoint.is_old), target, job, reason, difference)


def _values(
    settings: argparse.Namespace, family: str, job: str, given: Dict[str, Any], biased: bool
) -> Dict[str, Any]:
    if family == DENSE:
        if given:
            raise UserError(f"{_flag(next(iter(given)))} has no meaning for --to dense: leave it out.")
        return {}
    known = {field.name: field.default for field in dataclasses.fields(FAMILIES[family])}
    foreign = [name for name in given if name not in known]
    if foreign:
        raise UserError(f"{_flag(foreign[0])} is not a flag of --to {family}: leave it out.")
    values = {**known, **weights.default_values(family, weights.heads_of(settings, job), given)}
    if family == "moa":
        values.update(expert_bias=biased)
    return {**values, **given}


def _in_precision_of(model: nn.Module, checkpoint: Checkpoint) -> nn.Module:
    """Weights in half precision stay so, except in new routers and gates."""
    half = {
        name: t.dtype for name, t in checkpoint.model.items() if t.dtype in (torch.float16, torch.bfloat16)
    }
    if half:
        dtype = next(iter(half.values()))
        for name, parameter in model.named_parameters():
            if not set(name.split(".")) & set(weights.OF_ROUTING):
                parameter.data = parameter.data.to(dtype)
    return model


def _tolerance(checkpoint: Checkpoint) -> float:
    """The difference that rounding rescaled weights to the checkpoint's precision may make."""
    kinds = {tensor.dtype for tensor in checkpoint.model.values() if tensor.is_floating_point()}
    return 10 * max(torch.finfo(kind).eps for kind in kinds)


def _tied_as(model: nn.Module, state: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    first: Dict[Tuple[int, Tuple[int, ...]], str] = {}
    for name, tensor in model.state_dict().items():
        leader = first.setdefault((tensor.data_ptr(), tuple(tensor.shape)), name) if tensor.numel() else name
        state[name] = state[leader]
    return state


def _config(checkpoint: Checkpoint, group: Any, family: str) -> Dict[str, Any]:
    """All settings, with the new model's. For a dense model, stock fairseq knows every name in them."""
    cfg = {**checkpoint.cfg, "model": group}
    if family != DENSE or checkpoint.is_old:
        return cfg
    for key, rename in (
        ("task", lambda name: _PLAIN.get(name, name)),
        ("criterion", lambda name: name.replace("_with_routing", "")),
    ):
        part = cfg.get(key)
        if isinstance(part, dict) and isinstance(part.get("_name"), str):
            cfg[key] = {**part, "_name": rename(part["_name"])}
    if isinstance(cfg.get("common"), dict):
        cfg["common"] = {**cfg["common"], "user_dir": None}
    return cfg


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq convert`."""
    parser.add_argument("input", type=Path, metavar="IN", help="a checkpoint of fairseq's, or .safetensors")
    parser.add_argument("output", type=Path, metavar="OUT", help="the file to write")
    parser.add_argument("--force", action="store_true", help="overwrite an existing OUT (never IN)")
    parser.add_argument("--to", choices=TARGETS, help="the attention to convert to; without: the same model")
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="what to write: fairseq's .pt, or .safetensors with the settings as .json "
        "beside it (default: by the ending of OUT)",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="binarised data: print the loss before and after"
    )
    parser.add_argument("--subset", default="valid", help="which part of the data (valid)")
    parser.add_argument("--max-tokens", type=int, default=2048, help="tokens in a batch of the data (2048)")
    parser.add_argument(
        "--max-batches", type=int, default=50, metavar="N", help="use at most N batches of the data (50)"
    )
    family = parser.add_argument_group("flags of the new family")
    fields: Dict[str, dataclasses.Field] = {}
    for name in TARGETS[:-1]:
        types = typing.get_type_hints(FAMILIES[name])
        for field in dataclasses.fields(FAMILIES[name]):
            if field.name in fields:
                continue
            fields[field.name] = field
            options: Dict[str, Any] = {
                "default": argparse.SUPPRESS,
                "help": f"{name}: {field.metadata['help']}",
            }
            options["help"] = options["help"].replace("%", "%%")
            if types[field.name] is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options["type"] = {Optional[int]: int}.get(types[field.name], types[field.name])
                options["choices"] = field.metadata.get("choices")
            family.add_argument(_flag(field.name), **options)


def run(args: argparse.Namespace) -> int:
    """Convert, check, print the outcome, and write."""
    names = {field.name for family in FAMILIES.values() for field in dataclasses.fields(family)}
    given = {name: value for name, value in vars(args).items() if name in names}
    by_ending = "safetensors" if args.output.suffix == ".safetensors" else "pt"
    file_format = args.format or by_ending
    if file_format != by_ending:
        raise UserError(f"{args.output}: a file of --format {file_format} ends in .{file_format}.")
    files = lambda path: [path, settings_file(path)] if path.suffix == ".safetensors" else [path]  # noqa: E731
    for output in files(args.output):
        refuse_overwriting(output, files(args.input), "OUT")
        if os.path.lexists(output) and not args.force:
            raise UserError(f"OUT {output} exists: choose another name, or give --force to overwrite it.")
    checkpoint = read(args.input)
    if args.to is None:
        if given:
            raise UserError(f"{_flag(next(iter(given)))} needs --to: without it the model is not converted.")
        write(checkpoint, args.output, file_format)
        print(f"wrote the same model to {' and '.join(map(str, files(args.output)))}")
        return 0
    with explaining(f"{args.input} cannot be converted", str(args.input)):
        source = of_checkpoint(checkpoint)
        done = convert(checkpoint, source, args.to, given)
    if done.reason is None:
        print(f"exact: outputs in float64 differ by {done.difference:.1e} of the largest")
    else:
        print(f"not exact: {done.reason}")
    if args.data is not None:
        limits = (args.data, args.subset, args.max_tokens, args.max_batches)
        before, after = mean_losses([source, done.model], checkpoint, done.job, *limits)
        print(f"loss on {args.subset}: {before:.4f} → {after:.4f} bits per token ({after - before:+.4f})")
    elif done.reason is not None:
        print("--data DIR measures how much the loss changes")
    write(done.checkpoint, args.output, file_format)
    print(f"wrote {' and '.join(map(str, files(args.output)))}")
    return 0


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
