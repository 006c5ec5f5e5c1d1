"""Continue a text with a trained causal language model.

echo "The game was released in" | moa-fairseq complete runs/wikitext2_lm_moa_tiny --tokens 40
moa-fairseq complete RUN prompts.txt --sample 10 --seed 3      samples from the 10 likeliest symbols
"""

import argparse
from typing import Any

import torch

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.catalogue import LANGUAGE_MODELING
from moa_fairseq.experiments.inference import text_model
from moa_fairseq.experiments.inference.text_model import (
    TextModel,
    answers,
    lines_of,
    open_output,
    shown,
    status_of,
)

ANY_ORDER = True  # FILE may be after the flags


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq complete`."""
    text_model.add_arguments(parser, "text file with one beginning per line")
    add = parser.add_argument
    add("--tokens", type=int, default=40, metavar="N", help="number of symbols to add (40)")
    add("--sample", type=int, metavar="N", help="sample from the N likeliest (default: greedy)")
    add("--temperature", type=float, metavar="X", help="sampling temperature of --sample (1)")
    add("--seed", type=int, metavar="N", help="random seed of --sample (1)")


def run(args: argparse.Namespace) -> int:
    """Complete line by line. Returns the exit status."""
    text_model.resolve_model(args)
    _check_flags(args)
    torch.manual_seed(1 if args.seed is None else args.seed)
    model = text_model.load(args, LANGUAGE_MODELING)
    positions = model.models[0].max_positions()
    longest = positions - args.tokens
    if longest < 1:
        raise UserError(f"--tokens {args.tokens}: the model has positions for {positions} symbols.")
    settings = _generation_settings(args, model)
    left_out = 0
    with open_output(args) as stream, torch.no_grad():
        for batch in lines_of(args.file):
            for answer in answers(model, batch, settings, longest):
                left_out += answer.is_left_out
                text = ""
                if answer.hypotheses:
                    # The line without </s>. fairseq's limit is that of the longest line of the batch
                    length = len(answer.symbols) - 1 + args.tokens
                    text = model.decode(answer.hypotheses[0]["tokens"][:length])
                print(shown(text, stream), file=stream)
            stream.flush()
    return status_of(left_out)


def _check_flags(args: argparse.Namespace) -> None:
    """Raise UserError for a number out of range, and for flags of --sample without it."""
    for flag, value in (("--tokens", args.tokens), ("--sample", args.sample)):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value} is less than 1.")
    for flag, value in (("--temperature", args.temperature), ("--seed", args.seed)):
        if value is not None and args.sample is None:
            raise UserError(f"{flag} has no effect without sampling. Add --sample N.")
    if args.temperature is not None and args.temperature <= 0:
        raise UserError(f"--temperature {args.temperature} is not positive.")


def _generation_settings(args: argparse.Namespace, model: TextModel) -> dict[str, Any]:
    """The arguments of fairseq's `generate`."""
    settings: dict[str, Any] = {
        "beam": 1,
        "max_len_a": 1,
        "max_len_b": args.tokens - 1,  # fairseq counts one symbol more than the text has
        "temperature": 1.0 if args.temperature is None else args.temperature,
    }
    if args.sample is not None:
        settings.update(sampling=True, sampling_topk=min(args.sample, len(model.tgt_dict)))
    return settings
