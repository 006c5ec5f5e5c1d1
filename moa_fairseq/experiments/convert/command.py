"""Convert a trained fairseq Transformer into a mixture of attention heads, or a mixture into a Transformer.

  moa-fairseq convert dense.pt --to moh --moh-shared-heads 2 --experts-per-token 1 moh.pt
  moa-fairseq convert dense.pt --to mae mae.pt                       even gates: the same outputs
  moa-fairseq convert uni_mae.pt --to dense dense.pt                 for stock fairseq and CTranslate2
  moa-fairseq convert my-model --to fairseq --like run.pt new.pt     from transformers: equal weights

Translation, masked and causal language models. Before anything is written, both models run in float64
on random sentences: an exact conversion must give the same outputs, otherwise nothing is written. If a
conversion cannot be exact, the reason is printed, and with --data the loss before and after; with --to dense
it is an error.
OUT has no optimizer state; continue training with fairseq-train --finetune-from-model OUT and the flags of
the architecture.
"""

import argparse
import shlex
import sys
import typing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import moa_fairseq  # noqa: F401  (registers the models)
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.convert import models, plain, weights
from moa_fairseq.experiments.convert.check import LossData, largest_difference, mean_losses
from moa_fairseq.experiments.convert.models import DENSE, Checkpoint, family_fields
from moa_fairseq.experiments.records.provenance import provenance
from moa_fairseq.files import checksum, refuse_existing, refuse_overwriting
from moa_fairseq.plugin.families import FAMILIES
from moa_fairseq.plugin.patches.malformed_checkpoints import explaining

MIXTURES = ("moh", "mae")
FAIRSEQ = "fairseq"  # the value of --to that converts a folder of transformers


class Conversion(NamedTuple):
    """A conversion's outcome.

    Args:
        checkpoint: the checkpoint to write.
        model: the converted model.
        job: a key of `models.BODIES`.
        reason: why the conversion is not exact; None if it is exact.
        difference: what `largest_difference` returns for the two models.
    """

    checkpoint: Checkpoint
    model: nn.Module
    job: str
    reason: str | None
    difference: float


def convert(
    checkpoint: Checkpoint, source: nn.Module, family: str, values_by_flag: dict[str, Any]
) -> Conversion:
    """The same model with another attention.

    Args:
        checkpoint: the checkpoint to convert.
        source: the checkpoint's model; it stays in float64.
        family: the family of the new attention, one of MIXTURES, or DENSE.
        values_by_flag: name of a field of the family's settings → value that the user gave.

    Raises:
        UserError: if the conversion is impossible, or not exact where it has to be.
    """
    settings = checkpoint.settings
    origin, job = models.kind_of(settings)
    if origin == family:
        raise UserError(f"--to {family}: the checkpoint's model already belongs to that family.")
    if getattr(settings, "initialization", None) == "admin":
        raise UserError(
            "The checkpoint was trained with --initialization admin, whose factors on the shortcuts no other "
            "model has. It cannot be converted."
        )
    values = _values(family, settings, job, values_by_flag)
    if family == DENSE:
        weights.refuse_what_fairseq_lacks(settings)
    state = source.state_dict() if origin == DENSE else weights.dense_weights(source)
    target_settings = models.settings_for(settings, family, job, values)
    target = models.build(target_settings, state)
    reason = None
    if family == DENSE:
        models.load(target, state)
    else:
        reason = weights.fill(target, state)
    floats = filter(torch.is_floating_point, checkpoint.model.values())
    precisions = {tensor.dtype for tensor in floats}
    for half in (torch.float16, torch.bfloat16):
        if half in precisions:
            _to_half_precision(target, half)
    state = dict(target.state_dict())  # tied weights stay tied
    difference = largest_difference(source, target, job, settings)
    # Rescaled weights are rounded
    tolerance = 10 * max(torch.finfo(precision).eps for precision in precisions)
    if reason is None and not difference <= tolerance:
        raise UserError(
            f"The converted model's outputs should be equal, but differ by {difference:.1e} of the largest, "
            "so nothing was written. Please report this with the architecture and its flags."
        )
    cfg = _config(checkpoint, models.as_group(target_settings, family, job), family)
    return Conversion(Checkpoint(state, cfg, checkpoint.is_old), target, job, reason, difference)


def _values(
    family: str, settings: argparse.Namespace, job: str, values_by_flag: dict[str, Any]
) -> dict[str, Any]:
    """The settings of the new family: the user's, and defaults. Raises UserError for an unknown flag."""
    values: dict[str, Any] = {}
    if family != DENSE:
        values = {field.name: field.default for field in FAMILIES[family].own_fields()}
    for name in values_by_flag:
        if name not in values:
            raise UserError(f"--to {family} has no flag {_flag(name)}. Leave it out.")
    if family == "moh":
        values |= weights.moh_defaults(settings, job, values_by_flag)
    return values | values_by_flag


def _to_half_precision(model: nn.Module, precision: torch.dtype) -> None:
    """Round all weights except the weights of routers and gates."""
    for name, parameter in model.named_parameters():
        if set(weights.OF_ROUTING).isdisjoint(name.split(".")):
            parameter.data = parameter.data.to(precision)


def _config(checkpoint: Checkpoint, group: Any, family: str) -> dict[str, Any]:
    """The checkpoint's settings, with the new model's in place of the old.

    Those of a dense model name no task or criterion of this package, so stock fairseq can read them.
    """
    cfg = dict(checkpoint.cfg, model=group)
    if family != DENSE or checkpoint.is_old:
        return cfg
    for key, suffix in (("task", "_bcd"), ("criterion", "_with_routing")):
        section = cfg.get(key)
        if isinstance(section, dict) and isinstance(section.get("_name"), str):
            cfg[key] = dict(section, _name=section["_name"].removesuffix(suffix))
    if isinstance(cfg.get("common"), dict):
        cfg["common"] = dict(cfg["common"], user_dir=None)
    return cfg


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq convert`."""
    add = parser.add_argument
    add(
        "input",
        type=Path,
        metavar="IN",
        help="a checkpoint of fairseq's; of --to fairseq: a folder",
    )
    add("output", type=Path, metavar="OUT", help="the file to write")
    add("--force", action="store_true", help="overwrite an existing OUT (never IN)")
    add(
        "--to",
        choices=(*MIXTURES, DENSE, FAIRSEQ),
        required=True,
        help="the attention to convert to, or fairseq",
    )
    add(
        "--like",
        type=Path,
        metavar="CHECKPOINT",
        help="of --to fairseq: a checkpoint of the run that was exported, whose settings OUT has",
    )
    add(
        "--data",
        type=Path,
        metavar="DATA-BIN",
        help="binarised data folder: print the loss before and after",
    )
    add("--subset", default="valid", help="subset of the data (valid)")
    add("--max-tokens", type=int, default=2048, help="tokens per batch of the data (2048)")
    add(
        "--max-batches",
        type=int,
        default=50,
        metavar="N",
        help="largest number of batches to read (50)",
    )
    group = parser.add_argument_group("flags of the new family, as its architectures have them")
    for family in MIXTURES:
        kinds = typing.get_type_hints(FAMILIES[family])
        for field in FAMILIES[family].own_fields():
            kind = kinds[field.name]
            options: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
            if kind is not bool:
                kind = int if kind == int | None else kind
                options = {"type": kind, "choices": field.metadata.get("choices")}
            text = f"{family}: {field.metadata['help']}".replace("%", "%%")
            group.add_argument(_flag(field.name), default=argparse.SUPPRESS, help=text, **options)


def run(args: argparse.Namespace) -> int:
    """Convert, check, print the outcome, and write."""
    refuse_overwriting(args.output, [args.input], "OUT")
    refuse_existing(args.output, args.force, "OUT")
    command = shlex.join(["moa-fairseq", *sys.argv[1:]])
    if (args.like is None) == (args.to == FAIRSEQ):
        raise UserError("--like CHECKPOINT goes with --to fairseq: give both or neither.")
    file = args.input / plain.WEIGHTS if args.to == FAIRSEQ else args.input
    checkpoint = models.read(args.like if args.to == FAIRSEQ else args.input)
    # At once, because a training may replace the file while its weights are converted
    digest = checksum(file) if file.is_file() else None
    made_by = provenance(command=command, converted_from=[args.input.name, digest])
    if args.to == FAIRSEQ:
        converted = Checkpoint(
            plain.weights_of(args.input, checkpoint.model), checkpoint.cfg, checkpoint.is_old
        )
    else:
        converted = _convert_and_print(args, checkpoint)
    models.write(converted, args.output, made_by)
    print(f"wrote {args.output}")
    return 0


def _convert_and_print(args: argparse.Namespace, checkpoint: Checkpoint) -> Checkpoint:
    """Convert the attention of a checkpoint's model, and print how exact this is."""
    names = family_fields()
    values_by_flag = {name: value for name, value in vars(args).items() if name in names}
    with explaining(f"{args.input} cannot be converted", str(args.input)):
        models.kind_of(checkpoint.settings)  # an unknown model is refused before it is built
        source = models.build(checkpoint.settings, checkpoint.model)
        models.load(source, checkpoint.model)
        result = convert(checkpoint, source, args.to, values_by_flag)
    if result.reason is None:
        print(f"exact: outputs in float64 differ by {result.difference:.1e} of the largest")
    else:
        print(f"not exact: {result.reason}")
    if args.data is not None:
        data = LossData(args.data, args.subset, args.max_tokens, args.max_batches)
        before, after = mean_losses([source, result.model], checkpoint, result.job, data)
        print(
            f"loss on {args.subset}: {before:.4f} → {after:.4f} bits per token ({after - before:+.4f})"
        )
    elif result.reason is not None:
        print("To measure the change in loss, give --data DATA-BIN.")
    return result.checkpoint


def _flag(name: str) -> str:
    """The flag of a field of settings."""
    return f"--{name.replace('_', '-')}"
