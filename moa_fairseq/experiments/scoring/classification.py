"""Accuracy of a sentence classifier: `moa-fairseq score --classifier CHECKPOINT --data DIR`."""

import argparse
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.listops import GROUPS
from moa_fairseq.experiments.scoring.trained_model import batches, device_for, load_trained

_FEW = 10  # the result of a recipe has the accuracies of groups with up to ten values


@torch.no_grad()
def score(
    checkpoint: Path, data: Path | None, subset: str, max_tokens: int, cpu: bool
) -> dict[str, Any]:
    """The accuracy of a classifier, on the whole subset and on the groups of the data.

    Args:
        checkpoint: the file.
        data: the binarised folder; None: that of the training.
        subset: the name of the subset, such as "test".
        max_tokens: the largest number of tokens of a batch.
        cpu: whether the model runs on the CPU although there is a GPU.

    Returns:
        The content of `--json`: "accuracy" has "score" in per cent, "sentences", their number, and "by",
        group → value → score and sentences; "meta" says how the model was evaluated.

    Raises:
        UserError: for a model that is not a classifier, a subset that does not exist, sentences that are too
            long for the model, or a damaged file of groups.
    """
    model, task = load_trained(checkpoint, data)
    heads = getattr(model, "classification_heads", {})
    if not len(heads) or not hasattr(task, "label_dictionary"):
        raise UserError(
            f"{checkpoint} is not a classifier of sentences: it was trained for {type(task).__name__}."
        )
    device = device_for(cpu)
    model = model.to(device).eval()
    head = next(iter(heads))
    is_correct: dict[int, bool] = {}  # number of a sentence → whether its predicted class is right
    for sample in batches(task, model, subset, max_tokens, device):
        logits, _ = model(**sample["net_input"], features_only=True, classification_head_name=head)
        hits = logits.argmax(1).eq(sample["target"].view(-1))
        is_correct.update(zip(sample["id"].tolist(), hits.tolist()))
    count = len(task.dataset(subset))
    if missing := count - len(is_correct):
        raise UserError(
            f"--subset {subset}: {missing:,} of {count:,} sentences are longer than the model or "
            f"--max-tokens {max_tokens} allows. Raise the latter (score.flags.max-tokens in a recipe); what "
            "is longer than the model reads must be taken out of the subset, or the model trained with more "
            "--max-positions."
        )
    by_group: dict[str, Any] = {}
    evaluation: dict[str, Any] = {"sentences": count}
    for name, groups in _groups(Path(task.cfg.data) / GROUPS / f"{subset}.tsv", count).items():
        values = {}
        scores = {}
        for value, numbers in sorted(groups.items()):
            values[value] = _accuracy([is_correct[number] for number in numbers])
            scores[str(value)] = round(values[value]["score"], 2)
        by_group[name] = values
        if len(values) <= _FEW:
            evaluation[f"accuracy_by_{name}"] = scores
    return {
        "accuracy": _accuracy(is_correct.values()) | {"by": by_group},
        "meta": {
            "checkpoint": str(checkpoint),
            "data": str(task.cfg.data),
            "subset": subset,
            "evaluation": evaluation,
        },
    }


def _accuracy(hits: Collection[bool]) -> dict[str, Any]:
    return {"score": 100 * sum(hits) / len(hits), "sentences": len(hits)}


def _groups(path: Path, sentences: int) -> dict[str, dict[int, list[int]]]:
    """Name of a group → value → the numbers of the sentences with that value; empty without groups."""
    if not path.is_file():
        return {}
    head, *lines = path.read_text("utf-8").splitlines() or [""]
    names = head.split("\t")
    groups: dict[str, dict[int, list[int]]] = {name: {} for name in names}
    for number, line in enumerate(lines):
        values = line.split("\t")
        if len(values) != len(names) or not all(map(str.isdecimal, values)):
            raise UserError(
                f"{path}, line {number + 2}: {len(names)} whole numbers are expected. Prepare the data again."
            )
        for name, value in zip(names, values):
            groups[name].setdefault(int(value), []).append(number)
    if len(lines) != sentences:
        raise UserError(
            f"{path} has {len(lines):,} lines for {sentences:,} sentences: prepare the data again."
        )
    return groups


def run(args: argparse.Namespace) -> int:
    """Print the accuracy of one model. Raises UserError on bad input."""
    if args.max_tokens < 1:
        raise UserError("--max-tokens must be at least 1.")
    scores = score(args.classifier, args.data, args.subset, args.max_tokens, args.cpu)
    if args.json:
        print(json.dumps(scores, indent=2))
        return 0
    accuracy = scores["accuracy"]
    print(
        f"accuracy {accuracy['score']:.2f} %  [{accuracy['sentences']:,} sentences of {args.subset}]"
    )
    for name, values in accuracy["by"].items():
        for value, row in values.items():
            print(f"  {name} {value:>3}: {row['score']:6.2f} %  [{row['sentences']:,}]")
    return 0
