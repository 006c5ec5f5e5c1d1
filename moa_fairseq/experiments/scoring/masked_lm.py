"""Perplexity of a masked language model: `moa-fairseq score --masked-lm CHECKPOINT --data DIR`."""

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.manifest import MANIFEST, read_manifest
from moa_fairseq.experiments.data.unknown import count_symbols
from moa_fairseq.experiments.records.json_files import NUMBER, Values, check_kinds
from moa_fairseq.experiments.scoring.text_marks import lacks_spaces
from moa_fairseq.experiments.scoring.trained_model import batches, device_for, load_masked_lm

# Kinds of tokens. <s> and </s> are kept apart because a model nearly always guesses them
START, LINE_END, TEXT = KINDS = ("start", "line_end", "text")


@dataclasses.dataclass
class Masking:
    """The result of one masking of a data set.

    Args:
        tokens: a key of KINDS → the number of tokens of that kind.
        masked: a key of KINDS → the number of masked tokens.
        nll: a key of KINDS → the sum of the masked tokens' negative log-likelihoods, in nats.
    """

    tokens: dict[str, int] = dataclasses.field(default_factory=Counter)
    masked: dict[str, int] = dataclasses.field(default_factory=Counter)
    nll: dict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))

    def perplexity(self) -> float:
        """The perplexity of all masked tokens, e^(mean NLL) = 2^(loss in bits), as fairseq's validation."""
        return math.exp(sum(self.nll.values()) / sum(self.masked.values()))

    def text_perplexity(self) -> float:
        """The perplexity of the masked tokens of text, which are neither <s> nor </s>."""
        return math.exp(self.nll[TEXT] / self.masked[TEXT])

    def word_perplexity(self, words: int, lines: int) -> float:
        """The perplexity per word: e^(mean NLL of a subword × number of subwords ÷ number of words).

        Args:
            words: the number of words of the text, separated by white space.
            lines: the number of line ends, which count as words, as in WikiText's own perplexities.
        """
        total = 0.0
        for kind in (TEXT, LINE_END):
            total += self.nll[kind] / max(self.masked[kind], 1) * self.tokens[kind]
        return math.exp(total / (words + lines))


@torch.no_grad()
def measure(
    model: nn.Module, task: Any, subset: str, seed: int, max_tokens: int, device: torch.device
) -> Masking:
    """Mask a subset with the probabilities of the model's training, and let the model guess.

    The choice of the masked tokens depends only on the seed and their position in the data, not on batches.

    Args:
        model: the model, in evaluation mode, on the device.
        task: fairseq's task, which reads and masks the data.
        subset: the name of the subset, such as "test".
        seed: the seed of the masking.
        max_tokens: the largest number of tokens of a batch.
        device: the device of the model.

    Raises:
        UserError: for a subset that does not exist or is empty, and for samples that are too long.
    """
    task.cfg.seed = seed
    result = Masking()
    samples = 0
    dictionary = task.source_dictionary
    for sample in batches(task, model, subset, max_tokens, device):
        samples += sample["nsentences"]
        target = sample["target"]
        masked = target.ne(dictionary.pad())
        tokens = torch.where(masked, target, sample["net_input"]["src_tokens"])
        for kind, places in _places_by_kind(tokens, dictionary).items():
            result.tokens[kind] += int(places.sum())
        if not masked.any():
            continue
        logits = model(**sample["net_input"], masked_tokens=masked)[0]
        target = target[masked]
        nll = F.cross_entropy(logits.float().view(-1, logits.size(-1)), target, reduction="none")
        for kind, places in _places_by_kind(target, dictionary).items():
            result.masked[kind] += int(places.sum())
            result.nll[kind] += nll[places].double().sum().item()
    if missing := len(task.dataset(subset)) - samples:
        raise UserError(
            f"--subset {subset}: {missing:,} of {missing + samples:,} samples are longer than the model "
            "reads or --max-tokens allows, and the score would be one of the others. Cut them to fit with "
            "--sample-break-mode none (in a recipe: score.flags.sample-break-mode=none)."
        )
    if not result.masked[TEXT]:
        raise UserError(f"The subset {subset} has too little text: nothing of it was masked.")
    return result


def _places_by_kind(tokens: Tensor, dictionary: Any) -> dict[str, Tensor]:
    """A key of KINDS → which tokens are of that kind; padding is of none."""
    start = tokens.eq(dictionary.bos())
    end = tokens.eq(dictionary.eos())
    padding = tokens.eq(dictionary.pad())
    return {START: start, LINE_END: end, TEXT: ~(start | end | padding)}


def score(
    checkpoint: Path,
    data: Path | None,
    subset: str,
    seeds: list[int],
    max_tokens: int,
    cpu: bool,
    break_mode: str | None = None,
    lang: str | None = None,
) -> Values:
    """All scores of a checkpoint, the content of `--json`.

    Args:
        checkpoint: the file.
        data: the binarised folder; None: that of the training.
        subset: the name of the subset, such as "test".
        seeds: the seeds of the maskings, one or more.
        max_tokens: the largest number of tokens of a batch.
        cpu: whether the model runs on the CPU although there is a GPU.
        break_mode: the --sample-break-mode that cuts the text into samples; None: that of the training.
        lang: the language of the text, or None if it is unknown.

    Returns:
        For each metric "score", the mean over the maskings, with "sd", "values", and "over", the tokens that
        count; "meta" says how the model was evaluated, and has the warnings.

    Raises:
        UserError: if the checkpoint is not a masked language model, or the data does not fit it.
    """
    model, task = load_masked_lm(checkpoint, data)
    if break_mode:
        task.cfg.sample_break_mode = break_mode
    manifest = read_manifest(Path(task.cfg.data))
    facts = _counts_in(manifest, subset, task.cfg.data)
    device = device_for(cpu)
    model = model.to(device).eval()
    results = [measure(model, task, subset, seed, max_tokens, device) for seed in seeds]
    of_all = [result.perplexity() for result in results]
    of_text = [result.text_perplexity() for result in results]
    scores = {
        "masked_lm_ppl": _summary(of_all, "all masked tokens"),
        "masked_lm_text_ppl": _summary(of_text, "masked tokens but <s>, </s>"),
    }
    has_spaces = bool(facts) and not lacks_spaces(lang, facts["words"], facts.get("filled", 0))
    if has_spaces:
        of_words = [result.word_perplexity(facts["words"], facts["lines"]) for result in results]
        scores["masked_lm_word_ppl"] = _summary(of_words, "shared out to words and ends of line")
    (symbols,) = count_symbols(Path(task.cfg.data), (), [subset]).values()
    scores["meta"] = {
        "checkpoint": str(checkpoint),
        "data": str(task.cfg.data),
        "subset": subset,
        "evaluation": {
            "maskings": len(seeds),
            "first_masking_seed": seeds[0],
            "mask_prob": task.cfg.mask_prob,
            "tokens_per_sample": task.cfg.tokens_per_sample,
            "sample_break_mode": str(task.cfg.sample_break_mode),
            "unknown": round(symbols.share, 6),
        },
        "tokens": results[0].tokens,
        "masked_tokens": [sum(result.masked.values()) for result in results],
        "text": facts,
        "dictionary": manifest.get("dictionary"),
        "warnings": _warnings(task.cfg, subset, facts, results[0].tokens, has_spaces),
    }
    return scores


def _counts_in(manifest: Values, subset: str, data: str) -> Values:
    """The numbers of words and lines of a subset in the manifest of its data; {} without an entry."""
    splits = manifest.get("splits") or {}
    if subset not in splits:
        return {}
    kinds = dict.fromkeys(("words", "lines", "filled"), NUMBER)
    location = f"{data}/{MANIFEST}: splits: {subset}"
    check_kinds(
        splits[subset], kinds, location, "Prepare the data again.", required=("words", "lines")
    )
    return splits[subset]


def _summary(perplexities: list[float], over: str) -> Values:
    """The mean and the standard deviation over the maskings; `over` says which tokens count."""
    return {
        "score": statistics.mean(perplexities),
        "sd": statistics.stdev(perplexities) if len(perplexities) > 1 else None,
        "values": perplexities,
        "over": over,
    }


def _warnings(
    cfg: Any, subset: str, facts: Values, tokens: dict[str, int], has_spaces: bool
) -> list[str]:
    """Warnings if there is no word-level perplexity, or if tokens were left out.

    Args:
        cfg: the settings of the task.
        subset: the name of the subset.
        facts: the manifest's entry for the subset; empty if there is none.
        tokens: a key of KINDS → the number of tokens that were read.
        has_spaces: whether spaces separate the words of the text.
    """
    if not facts:
        return [
            f"{cfg.data} has no manifest.json that counts the words of {subset}: without it there is no "
            "word-level perplexity (moa-fairseq prepare writes one)"
        ]
    warnings = []
    if not has_spaces:
        warnings.append(
            f"{subset} has {facts['words']:,} words between spaces in {facts['filled']:,} lines with text: "
            "they do not part its words, so there is no word-level perplexity"
        )
    expected = facts["subwords"] + facts["lines"]
    if missing := expected - tokens[TEXT] - tokens[LINE_END]:
        warnings.append(
            f"{missing:,} of {expected:,} tokens of {subset} were left out by the training's "
            f"--shorten-method or --sample-break-mode {cfg.sample_break_mode}"
        )
    return warnings


def run(args: argparse.Namespace) -> int:
    """Print the perplexities of one model. Raises UserError on bad input."""
    if args.maskings < 1 or args.max_tokens < 1:
        flag = "--maskings" if args.maskings < 1 else "--max-tokens"
        raise UserError(f"{flag} must be at least 1.")
    seeds = list(range(args.mask_seed, args.mask_seed + args.maskings))
    scores = score(
        args.masked_lm,
        args.data,
        args.subset,
        seeds,
        args.max_tokens,
        args.cpu,
        args.sample_break_mode,
        args.target_lang,
    )
    for warning in scores["meta"]["warnings"]:
        print(f"moa-fairseq score: warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(scores, indent=2))
        return 0
    meta = scores.pop("meta")
    for name, summary in scores.items():
        spread = "" if summary["sd"] is None else f" ± {summary['sd']:.3f}"
        print(f"{name:<19} {summary['score']:.3f}{spread}  [{summary['over']}]")
    evaluation = ", ".join(f"{key} {value}" for key, value in meta["evaluation"].items())
    print(f"{args.subset}: {evaluation}; base: e^(nats per token)")
    return 0
