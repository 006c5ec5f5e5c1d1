"""What the analyses of one trained model share: flags, a data set run through it, its modules by kind."""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from moa_fairseq.attention.collector import NamedDecisions, collect_decisions
from moa_fairseq.errors import UserError
from moa_fairseq.evaluation.trained_model import batches
from moa_fairseq.json_files import write_json
from moa_fairseq.recipes.checkpoints import prepared_data, trained_checkpoint

# First and last part of a module's path → label of its kind of attention, in the order of the pictures.
KINDS_OF_ATTENTION = {
    ("encoder", "self_attn"): "encoder self-attention",
    ("decoder", "self_attn"): "decoder self-attention",
    ("decoder", "encoder_attn"): "decoder cross-attention",
}


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, the data that runs through it, and how."""
    parser.add_argument("model", type=Path, metavar="RUN_DIR|CHECKPOINT")
    parser.add_argument("--data", type=Path, metavar="DATA_BIN", help="binarised data folder (the run's)")
    parser.add_argument("--subset", default="valid", help="which subset of the data to run (valid)")
    parser.add_argument("--max-tokens", type=int, default=4096, metavar="N", help="tokens in a batch (4096)")
    add_report_arguments(parser)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the numbers go, and the device."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to this file as well")
    parser.add_argument("--cpu", action="store_true", help="do not use a GPU")


def checkpoint_and_data(
    model: Path, data: Optional[Path] = None, max_tokens: int = 4096
) -> Tuple[Path, Path]:
    """A run folder stands for its averaged (else its best) checkpoint and for the data it was trained on.

    Raises UserError for a folder without a checkpoint, a checkpoint without data, or an empty batch.
    """
    warnings.filterwarnings("ignore", message=".*pin_memory")
    if max_tokens < 1:
        raise UserError(f"--max-tokens {max_tokens}: a batch holds at least one token.")
    if model.is_dir():
        checkpoint = trained_checkpoint(model)
        if not checkpoint.is_file():
            raise UserError(
                f"{model} holds neither average.pt nor checkpoints/checkpoint_best.pt: train first."
            )
        return checkpoint, data or prepared_data(model) or Path()
    if data is None:
        raise UserError(
            f"{model} is not a run folder, so --data must name the binarised data to run through it."
        )
    return model, data


def forward_passes(
    task: Any, model: nn.Module, subset: str, max_tokens: int, device: torch.device
) -> Iterator[Tuple[Dict[str, Any], NamedDecisions]]:
    """(batch, decisions of all routers in forward order) for every batch of a subset, by teacher forcing.

    The model is put in evaluation mode on `device`. Raises UserError if the model has no router, or if
    the subset does not exist or is empty.
    """
    model = model.to(device).eval()
    empty = True
    for sample in batches(task, model, subset, max_tokens, device):
        with torch.no_grad(), collect_decisions() as decisions:
            model(**sample["net_input"], features_only=True)  # there is no router in the output layer
        if not decisions:
            raise UserError(f"This model has no router: {type(model).__name__} has no mixture of experts.")
        yield sample, decisions
        empty = False
    if empty:
        raise UserError(f"The subset {subset} has no sentence of at most {max_tokens} tokens.")


@dataclass
class RouterUse:
    """What one router did with a data set, without padding and without experts that are always on (MoH).

    counts [E]: how many tokens (or sequences: `scope`) chose each expert. gate_mass [E]: the gates they gave
    it, added up. favourites: how many gave each column of the probabilities their greatest value.
    total_entropy: Σ H(probabilities) in nats over the `instances` tokens or sequences.
    """

    name: str
    experts_per_token: int
    counts: Tensor
    gate_mass: Tensor
    favourites: Tensor
    scope: str = "tokens"
    instances: int = 0
    total_entropy: float = 0.0


def router_uses(passes: Iterable[NamedDecisions]) -> List[RouterUse]:
    """The use of each router over several forward passes, in the order in which the routers first ran."""
    uses: Dict[str, RouterUse] = {}
    for name, decision in chain.from_iterable(passes):
        padding, shared = decision.padding_mask, decision.shared
        real = slice(None) if padding is None else ~padding
        index, gate, probs = (
            values.detach()[real] for values in (decision.expert_index, decision.gate, decision.probs)
        )
        if name not in uses:
            counts, mass = torch.zeros(2, decision.num_experts - shared, dtype=torch.float64)
            favourites = torch.zeros(probs.size(1), dtype=torch.float64)
            uses[name] = RouterUse(name, index.size(1) - shared, counts, mass, favourites, decision.scope)
        use, mass = uses[name], gate.new_zeros(decision.num_experts, dtype=torch.float64)
        use.counts += decision.expert_counts.double().cpu()
        use.gate_mass += mass.scatter_add(0, index.flatten(), gate.double().flatten())[shared:].cpu()
        use.favourites += torch.bincount(probs.argmax(-1), minlength=probs.size(1)).cpu()
        use.instances += len(probs)
        use.total_entropy += torch.special.entr(probs.double()).sum().item()
    return list(uses.values())


def kind_of(name: str) -> str:
    """The kind of attention of a module.

    "decoder.layers.3.encoder_attn" is a "decoder cross-attention"; its choice for keys and values, whose name
    ends in ".keys", is "decoder cross-attention, keys"; a name that fits nowhere is "other".
    """
    path, side = name.removesuffix(".keys").split("."), ", keys" if name.endswith(".keys") else ""
    return KINDS_OF_ATTENTION.get((path[0], path[-1]), "other") + side


def by_kind(summaries: Sequence[Dict[str, Any]]) -> Dict[str, List[Dict[str, Any]]]:
    """Measurements of modules (each has the module's "name") by kind of attention; no empty kinds."""
    labels = [label + side for label in (*KINDS_OF_ATTENTION.values(), "other") for side in ("", ", keys")]
    groups = {label: [item for item in summaries if kind_of(item["name"]) == label] for label in labels}
    return {label: group for label, group in groups.items() if group}


def finish(text: str, report: Dict[str, Any], json_file: Optional[Path], *pictures: Path) -> None:
    """Write the report where --json names a file, print the text, and say which files were written."""
    if json_file:
        write_json(json_file, report)
    print(text)
    written = [*pictures, json_file] if json_file else pictures
    if written:
        print(f"wrote {', '.join(map(str, written))}")
