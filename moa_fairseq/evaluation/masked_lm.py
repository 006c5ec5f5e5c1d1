"""Perplexity of a masked language model: `moa-fairseq score --masked-lm CHECKPOINT --data DIR`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.data_prep.manifest import read_manifest
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.trained_model import batches, device_for, load_trained

# Kinds of tokens, told apart because <s> and </s> are nearly always guessed.
BOUNDARY_START, LINE_END, TEXT = "start", "line_end", "text"
KINDS = (BOUNDARY_START, LINE_END, TEXT)


@dataclasses.dataclass
class Masking:
    """The result of one masking of a data set: per kind of token, how many there are, how many were masked,
    and the negative log-likelihood of the masked ones, in nats."""

    tokens: Dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    masked: Dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    nll: Dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))

    def perplexity(self) -> float:
        """Over all masked positions, as in fairseq's validation: e^(mean NLL) = 2^(loss in bits)."""
        return math.exp(sum(self.nll.values()) / sum(self.masked.values()))

    def text_perplexity(self) -> float:
        """Over the masked positions that are text: neither <s> nor </s>."""
        return math.exp(self._mean(TEXT))

    def word_perplexity(self, words: int, lines: int) -> float:
        """Per word: from the mean NLL of a subword, times the number of subwords, over the number of words.

        words: white-space words of the text; lines: its line ends, each counted as one more word, as in
        WikiText's own perplexities.
        """
        total = sum(self._mean(kind) * self.tokens[kind] for kind in (TEXT, LINE_END))
        return math.exp(total / (words + lines))

    def _mean(self, kind: str) -> float:
        return self.nll[kind] / self.masked[kind] if self.masked[kind] else 0.0


@torch.no_grad()
def measure(
    model: nn.Module, task: Any, subset: str, seed: int, max_tokens: int, device: torch.device
) -> Masking:
    """Mask a subset with `seed` and the probabilities of the model's training, and let the model guess.

    Which tokens are masked depends only on the seed and their place in the data, not on the batches.
    Raises UserError for a subset that does not exist or is empty.
    """
    task.cfg.seed = seed
    result = Masking()
    dictionary = task.source_dictionary
    special = {BOUNDARY_START: dictionary.bos(), LINE_END: dictionary.eos()}
    for sample in batches(task, model, subset, max_tokens, device):
        target = sample["target"]
        masked = target.ne(dictionary.pad())
        original = torch.where(masked, target, sample["net_input"]["src_tokens"])
        _count(result.tokens, original[original.ne(dictionary.pad())], special)
        if not masked.any():
            continue
        logits = model(**sample["net_input"], masked_tokens=masked)[0]
        guessed = target[masked]
        nll = F.cross_entropy(logits.float().view(-1, logits.size(-1)), guessed, reduction="none").double()
        _count(result.masked, guessed, special)
        for kind in KINDS:
            result.nll[kind] += nll[_is_kind(guessed, kind, special)].sum().item()
    if not result.masked[TEXT]:
        raise UserError(f"The subset {subset} has too little text: nothing of it was masked.")
    return result


def _is_kind(tokens: Tensor, kind: str, special: Dict[str, int]) -> Tensor:
    if kind != TEXT:
        return tokens.eq(special[kind])
    return tokens.ne(special[BOUNDARY_START]) & tokens.ne(special[LINE_END])


def _count(counts: Dict[str, int], tokens: Tensor, special: Dict[str, int]) -> None:
    for kind in KINDS:
        counts[kind] += int(_is_kind(tokens, kind, special).sum())


def score(
    checkpoint: Path, data: Optional[Path], subset: str, seeds: List[int], max_tokens: int, cpu: bool
) -> Dict[str, Any]:
    """All scores of one checkpoint, as `--json` prints them. Raises UserError if it cannot be scored."""
    model, task = load_trained(checkpoint, data)
    if not hasattr(task, "mask_idx"):
        raise UserError(
            f"{checkpoint} is not a masked language model: it was trained for {type(task).__name__}."
        )
    device = device_for(cpu)
    model = model.to(device).eval()
    results = [measure(model, task, subset, seed, max_tokens, device) for seed in seeds]
    manifest = read_manifest(Path(task.cfg.data))
    facts = manifest.get("splits", {}).get(subset)
    warnings = _warnings(facts, results[0], task.cfg.data, subset)
    scores = {
        "masked_lm_ppl": _summary([result.perplexity() for result in results], "all masked tokens"),
        "masked_lm_text_ppl": _summary([r.text_perplexity() for r in results], "masked tokens but <s>, </s>"),
    }
    if facts:
        values = [result.word_perplexity(facts["words"], facts["lines"]) for result in results]
        scores["masked_lm_word_ppl"] = _summary(values, "shared out to words and ends of line")
    meta = {
        "checkpoint": str(checkpoint),
        "data": str(task.cfg.data),
        "subset": subset,
        "evaluation": {
            "maskings": len(seeds),
            "first_masking_seed": seeds[0],
            "mask_prob": task.cfg.mask_prob,
            "tokens_per_sample": task.cfg.tokens_per_sample,
            "sample_break_mode": str(task.cfg.sample_break_mode),
        },
        "tokens": results[0].tokens,
        "masked_tokens": [sum(result.masked.values()) for result in results],
        "text": facts,
        "dictionary": manifest.get("dictionary"),
        "warnings": warnings,
    }
    return {**scores, "meta": meta}


def _warnings(facts: Optional[Dict[str, Any]], result: Masking, data: str, subset: str) -> List[str]:
    if not facts:
        return [
            f"{data} has no manifest.json that counts the words of {subset}: without it there is no "
            f"word-level perplexity (moa-fairseq prepare writes one)"
        ]
    found, expected = result.tokens[TEXT] + result.tokens[LINE_END], facts["subwords"] + facts["lines"]
    if found == expected:
        return []
    return [
        f"{expected - found:,} of {expected:,} tokens of {subset} were left out: their samples are longer "
        f"than the model's positions (--sample-break-mode none cuts them into samples that fit)"
    ]


def _summary(values: List[float], over: str) -> Dict[str, Any]:
    spread = statistics.stdev(values) if len(values) > 1 else None
    return {"score": statistics.mean(values), "sd": spread, "values": values, "over": over}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq score --masked-lm`."""
    group = parser.add_argument_group("masked language models")
    group.add_argument(
        "--maskings",
        type=int,
        default=5,
        metavar="N",
        help="how many maskings are averaged (default: %(default)s)",
    )
    group.add_argument(
        "--mask-seed", type=int, default=1, metavar="S", help="seeds S, S+1, ... (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Print the perplexities of one model. Raises UserError on bad input."""
    if args.maskings < 1 or args.max_tokens < 1:
        flag = "--maskings" if args.maskings < 1 else "--max-tokens"
        raise UserError(f"{flag} must be at least 1.")
    seeds = list(range(args.mask_seed, args.mask_seed + args.maskings))
    scores = score(args.masked_lm, args.data, args.subset, seeds, args.max_tokens, args.cpu)
    for warning in scores["meta"]["warnings"]:
        print(f"moa-fairseq score: warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(scores, indent=2))
        return 0
    for name, summary in scores.items():
        if name != "meta":
            spread = "" if summary["sd"] is None else f" ± {summary['sd']:.3f}"
            print(f"{name:<19} {summary['score']:.3f}{spread}  [{summary['over']}]")
    evaluation = ", ".join(f"{key} {value}" for key, value in scores["meta"]["evaluation"].items())
    print(f"{args.subset}: {evaluation}; base: e^(nats per token)")
    return 0
