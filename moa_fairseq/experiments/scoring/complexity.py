"""Parameters and multiply-accumulate operations (MACs) of an architecture, part by part.

The model is built exactly as fairseq-train would build it, but without weights, so this takes no
memory and no data. MACs are those of one forward pass over one sentence pair (App. E of the MoA
paper): every matrix product counts, biases, norms, softmax and embedding look-ups do not. Causal
attention counts as the full square that a GPU computes.

  plain count          linear layers, expert projections, router, attention scores and values
  papers' convention   the same without the attention's scores and values: this is what the
                       printed MACs of MoA's Tables 1 and 3 and of Table 2's dense row contain
  attention twice      the plain count with scores and values once more: what the MoA rows of Table 2
                       contain (within 0.7 %; give --vocab-size 50265 --src-len 128)
  attention, total     projections, routers, scores and values of every attention: half of a small model's
                       total may be its output layer, which hides what an attention costs
  cache                what a generated token leaves behind in each layer of a decoder: keys and values of its
                       self-attention, two bytes a number, and indices of keys' experts where there are any
  SwitchHead's layer   one attention layer, one chunk of --tgt-len tokens, by the formula that prints the
                       tables of the SwitchHead paper: MACs, and the numbers that training stores;
                       with --positions xl a carried chunk is attended to as well
  --branch             how large attention starts: the norm of its output ÷ that of its input, in the model
                       before training, on 8 x 20 random tokens; the mean of all attentions and of the
                       seeds 1 to 4 (--seed changes nothing)

Everything after a lone -- goes to fairseq as model flags:

  moa-fairseq complexity --arch moa_transformer_base -- --encoder-layers 3 --decoder-layers 3
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from fairseq.models import FairseqLanguageModel
from fairseq.modules import MultiheadAttention
from torch import nn

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.records.json_files import selected
from moa_fairseq.experiments.scoring.branch import branch_size
from moa_fairseq.experiments.scoring.published_cost import published_cost
from moa_fairseq.experiments.tables import Column, Table, terminal_width
from moa_fairseq.layers.attention import Attention
from moa_fairseq.layers.positions import RelativePositions
from moa_fairseq.layers.sequence_gate import gates_of
from moa_fairseq.layers.sigma_moe import SigmaMoE

PARTS = {
    "embedding": "embedding",
    "encoder_attention": "encoder attention",
    "decoder_self_attention": "decoder self-attention",
    "cross_attention": "cross-attention",
    "feed_forward": "feed-forward",
    "router": "router and gates",
    "norms": "norms",
    "output": "output",
    "other": "other",
    "attention_matmul": "attention scores and values",
}
_ATTENTIONS = ("encoder_attention", "decoder_self_attention", "cross_attention")
_TIED_OUTPUTS = ("RobertaLMHead", "TiedLinear")  # they multiply by the token embedding
# Flags of `complexity` that fairseq has, too
_ARCHITECTURE_FLAGS = ("num_experts", "experts_per_token", "expert_dim")


@dataclass
class Cost:
    """What a model costs.

    Args:
        parameters: a key of PARTS → the number of parameters.
        macs: a key of PARTS → the number of MACs.
        not_counted: the types of modules with matrices whose MACs no rule counts.
        switchhead_layer: the cost of the model's first self-attention: "macs" and "floats" by the formula of
            SwitchHead's authors, and "plain_macs", every matrix product once. None if they have no formula.
        attention_parameters, attention_macs: the sums over all attentions, which include their routers,
            scores and values. In `parameters` and `macs` these are separate parts.
        cache_bytes: the bytes that the self-attention of a decoder's layer caches for a token, with 16 bits
            per number; None without a decoder.
        updated_parameters: --finetune method → the number of parameters that it updates; empty except for
            MAE.
    """

    parameters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    macs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    not_counted: list[str] = field(default_factory=list)
    switchhead_layer: dict[str, int] | None = None
    attention_parameters: int = 0
    attention_macs: int = 0
    cache_bytes: int | None = None
    updated_parameters: dict[str, int] = field(default_factory=dict)

    @property
    def total_macs(self) -> int:
        """The MACs of all matrix products."""
        return sum(self.macs.values())

    @property
    def total_parameters(self) -> int:
        """The number of all parameters; tied ones count once."""
        return sum(self.parameters.values())


def count(model: nn.Module, src_len: int, tgt_len: int) -> Cost:
    """Count parameters and MACs of one sentence pair.

    A parameter that two modules share counts once, under the module that comes first, so a tied output
    projection has no parameters. A mixture counts its own MACs. In a language model with Transformer-XL's
    positions the keys of a carried chunk count, too.

    Args:
        model: a fairseq model, on any device (only shapes are read).
        src_len, tgt_len: the numbers of tokens of the sentence pair.
    """
    cost = Cost()
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        cost.parameters[part_of(owner, modules[owner])] += parameter.numel()
        if {"self_attn", "encoder_attn"} & set(owner.split(".")):
            cost.attention_parameters += parameter.numel()
    for name, module in modules.items():
        if name.startswith("decoder.") and "encoder_attn" not in name:
            cost.cache_bytes = _cache_bytes(module) or cost.cache_bytes
    _count_macs(cost, model, src_len, tgt_len)
    if gates_of(model):
        from moa_fairseq.plugin.coordinate_descent.finetuning import updated_by

        for method in ("ftg", "ftg_plus", "ftall"):
            cost.updated_parameters[method] = sum(map(torch.numel, updated_by(model, method)))
    return cost


def _count_macs(cost: Cost, model: nn.Module, src_len: int, tgt_len: int) -> None:
    """Add the MACs of all modules."""
    modules = dict(model.named_modules())
    unknown: set[str] = set()
    counted: set[nn.Module] = set()  # parts of mixtures, which count them
    for name, module in modules.items():
        part = part_of(name, module)
        queries, keys = _lengths(name, modules, src_len, tgt_len)
        if isinstance(module, Attention):
            # A chunk of a text may attend to the one before it
            carries = isinstance(model, FairseqLanguageModel)
            chunks = 2 if carries and isinstance(module.positions, RelativePositions) else 1
            macs = module.macs(queries, keys * chunks)
            _add(cost, part, macs)
            cost.attention_macs += sum(macs.values())
            layer = published_cost(module, queries, chunks)
            if layer and not cost.switchhead_layer:
                cost.switchhead_layer = layer | {"plain_macs": sum(macs.values())}
            counted.update(module.modules())
        elif isinstance(module, SigmaMoE):
            _add(cost, part, module.macs(queries))
            counted.update(module.modules())
        elif module in counted:
            continue
        elif isinstance(module, MultiheadAttention):
            products = 2 * queries * keys * module.embed_dim
            cost.macs["attention_matmul"] += products
            cost.attention_macs += products
        elif isinstance(module, nn.Linear) or type(module).__name__ in _TIED_OUTPUTS:
            # All bands of an adaptive softmax count
            products = module.get_parameter("weight").numel() * queries
            cost.macs[part] += products
            if part in _ATTENTIONS:
                cost.attention_macs += products
        elif _has_matrix(module):
            unknown.add(type(module).__name__)
    cost.not_counted = sorted(unknown)


def _add(cost: Cost, part: str, macs: Mapping[str, int]) -> None:
    """Add the MACs that a mixture counts."""
    cost.macs["router"] += macs["router"]
    cost.macs[part] += macs["projections"]
    cost.macs["attention_matmul"] += macs.get("scores", 0)


def _cache_bytes(module: nn.Module) -> int | None:
    """The bytes that an attention caches for each token, with 16 bits per number; None for other modules."""
    if isinstance(module, Attention):
        return module.cache_bytes()
    if isinstance(module, MultiheadAttention):
        return 2 * 2 * module.embed_dim  # keys and values
    return None


def _has_matrix(module: nn.Module) -> bool:
    """Whether a module that is no embedding multiplies by a matrix of its own."""
    if isinstance(module, nn.Embedding):
        return False
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


def _lengths(
    name: str, modules: Mapping[str, nn.Module], src_len: int, tgt_len: int
) -> tuple[int, int]:
    """The numbers of queries and keys that a module sees; a projection of keys sees keys alone."""
    path = name.split(".")
    if path[0] == "encoder":
        return src_len, src_len
    keys = tgt_len
    layer, is_self_attention, _ = name.partition(".self_attn")
    if "encoder_attn" in path:
        keys = src_len
    elif is_self_attention and getattr(modules[layer], "cross_self_attention", False):
        keys = src_len + tgt_len
    projects_keys = path[-1] in ("k_proj", "v_proj")
    return keys if projects_keys else tgt_len, keys


def part_of(name: str, module: nn.Module) -> str:
    """The key of PARTS for a module.

    Args:
        name: the dotted name of the module in `named_modules`.
        module: the module, whose type tells norms from the rest.
    """
    path = name.split(".")
    if {"router", "source_router", "gate"} & set(path):
        return "router"
    if {"output_projection", "lm_head", "adaptive_softmax"} & set(path):
        return "output"
    if "Norm" in type(module).__name__:
        return "norms"
    if "embed_tokens" in path or "embed_positions" in path:
        return "embedding"
    if "encoder_attn" in path:
        return "cross_attention"
    if "self_attn" in path:
        if path[0] == "encoder":
            return "encoder_attention"
        return "decoder_self_attention"
    if {"fc1", "fc2"} & set(path):
        return "feed_forward"
    return "other"


def complexity(
    arch: str,
    vocab_size: int = 32000,
    src_len: int = 10,
    tgt_len: int = 10,
    embeddings: str = "shared",
    model_flags: Sequence[str] = (),
) -> Cost:
    """Build an architecture without weights and count it.

    Args:
        arch, vocab_size, embeddings, model_flags: the arguments of `build_meta_model`.
        src_len, tgt_len: the numbers of tokens of the sentence pair.

    Raises:
        UserError: for a length below 1, and in the cases of `build_meta_model`.
    """
    # Building needs all of fairseq and every registered model; counting does not.
    from moa_fairseq.experiments.scoring.meta_model import build_meta_model

    for flag, length in (("--src-len", src_len), ("--tgt-len", tgt_len)):
        if length < 1:
            raise UserError(f"{flag} {length}: a sentence has at least one token.")
    return count(build_meta_model(arch, vocab_size, embeddings, model_flags), src_len, tgt_len)


def as_json(cost: Cost) -> dict[str, Any]:
    """The report as plain data; all counts are integers."""
    scores = cost.macs["attention_matmul"]
    report: dict[str, Any] = {
        "parameters": cost.total_parameters,
        "macs": cost.total_macs,
        "macs_paper_convention": cost.total_macs - scores,
        "macs_attention_twice": cost.total_macs + scores,
        "attention_parameters": cost.attention_parameters,
        "attention_macs": cost.attention_macs,
        "output_macs": cost.macs["output"],
        "cache_bytes": cost.cache_bytes,
        "parameters_by_part": {
            part: cost.parameters[part] for part in PARTS if part != "attention_matmul"
        },
        "macs_by_part": cost.macs,
    }
    for name, count in (cost.switchhead_layer or {}).items():
        report[f"switchhead_layer_{name}"] = count
    for method, parameters in cost.updated_parameters.items():
        report[f"updated_{method}"] = parameters
    report["not_counted"] = cost.not_counted
    return report


def as_text(title: str, cost: Cost) -> str:
    """The report as a table for people."""
    report = as_json(cost)
    layer = cost.switchhead_layer or {}
    without_output = report["parameters"] - cost.parameters["output"]
    rows: list[tuple[str, int | None, int | None]] = [
        (label, cost.parameters[part], cost.macs[part]) for part, label in PARTS.items()
    ]
    rows += [
        ("total", report["parameters"], report["macs"]),
        ("  attention, total", report["attention_parameters"], report["attention_macs"]),
        ("  without the output layer", without_output, report["macs"] - report["output_macs"]),
        ("papers' convention", None, report["macs_paper_convention"]),
        ("attention twice", None, report["macs_attention_twice"]),
        ("SwitchHead's layer", None, layer.get("macs")),
        ("  every product once", None, layer.get("plain_macs")),
        ("  numbers stored", None, layer.get("floats")),
    ]
    for method, updated in cost.updated_parameters.items():
        rows.append((f"updated by --finetune {method}", updated, None))
    notes = {
        "papers' convention": "no attention scores and values",
        "attention twice": "MoA's Table 2; see --help",
        "SwitchHead's layer": "its paper's formula; see --help",
    }
    table: list[dict[str, Any]] = []
    for label, parameters, macs in rows:
        if parameters or macs:
            note = notes.get(label)
            table.append({"part": label, "parameters": parameters, "macs": macs, "note": note})
    columns = [
        Column("part", "part"),
        Column("parameters", "parameters", ","),
        Column("macs", "MACs", ","),
        Column("note", ""),
    ]
    lines = [title, "", Table(columns, table).text(terminal_width())]
    if cost.cache_bytes is not None:
        lines.append(f"cache: {cost.cache_bytes:,} bytes per token and layer, 2 bytes per value")
    if cost.not_counted:
        lines.append(f"MACs of these modules are not counted: {', '.join(cost.not_counted)}")
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `moa-fairseq complexity`."""
    add = parser.add_argument
    add("--arch", required=True, help="any architecture of fairseq or moa_fairseq")
    add("--vocab-size", type=int, default=32000, metavar="V", help="dictionary size (32000)")
    add("--src-len", type=int, default=10, metavar="S", help="source tokens (10)")
    add("--tgt-len", type=int, default=10, metavar="T", help="target tokens (10)")
    add(
        "--embeddings",
        choices=["shared", "decoder", "separate"],
        default="shared",
        help="translation: one matrix for source, target and output as in the paper (shared, the default); "
        "for target and output only (decoder); three (separate)",
    )
    for name in _ARCHITECTURE_FLAGS:
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=int, metavar="N", help="overrides the architecture's value")
    add(
        "--branch",
        action="store_true",
        help="how large attention starts; needs memory for the weights",
    )
    add("--json", action="store_true", help="print JSON")
    add("model_flags", nargs="*", metavar="-- FLAG", help="more model flags of fairseq")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    model_flags = list(args.model_flags)
    for name in _ARCHITECTURE_FLAGS:
        if (value := getattr(args, name)) is not None:
            model_flags += [f"--{name.replace('_', '-')}", str(value)]
    cost = complexity(
        args.arch, args.vocab_size, args.src_len, args.tgt_len, args.embeddings, model_flags
    )
    branch = None
    if args.branch:
        branch = branch_size(args.arch, args.vocab_size, args.embeddings, model_flags)
    if args.json:
        names = ("arch", "vocab_size", "src_len", "tgt_len", "embeddings")
        report = selected(vars(args), names)
        report["model_flags"] = model_flags
        report.update(as_json(cost))
        if branch is not None:
            report["branch"] = branch
        print(json.dumps(report, indent=2))
        return 0
    lengths = f"{args.src_len} source and {args.tgt_len} target tokens"
    print(as_text(f"{args.arch}, {args.vocab_size:,} symbols, {lengths}", cost))
    if branch is not None:
        print(f"Before training attention's output is {branch:.3f} times as large as its input.")
    return 0
