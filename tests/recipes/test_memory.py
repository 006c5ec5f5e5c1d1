"""The estimate of activations against what autograd keeps; the bytes per parameter."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY

from moa_fairseq.evaluation.skeleton import build_skeleton, parse_training_flags
from moa_fairseq.recipes.planner.memory import activation_elements, estimate_memory


def kept_per_token(arch, flags):
    """Numbers that autograd keeps for one source and one target token, weights aside."""
    dictionary = Dictionary()
    for index in range(60):
        dictionary.add_symbol(f"w{index}")
    line = ["no-data", "--arch", arch, "--task", "translation", "--share-all-embeddings", *flags]
    args = parse_training_flags(line, "refused")
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, task).train()
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = torch.randint(5, 60, (8, 16))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(tokens, torch.full((8,), 16), tokens)
    del output
    return sum(kept.values()) / 4 / tokens.numel(), model


@pytest.mark.parametrize(
    ("arch", "flags"),
    [
        ("transformer", ["--dropout", "0.1"]),
        ("moa_transformer_base", ["--dropout", "0.2"]),
        ("moa_transformer_ablation_f", ["--dropout", "0.2"]),
        ("moa_transformer_tiny", ["--dropout", "0.2"]),
        ("switchhead_transformer_base", ["--dropout", "0.2"]),
        (
            "switchhead_transformer_base",
            ["--dropout", "0.2", "--switchhead-experts", "vkqo", "--sigma-moe-num-experts", "16"],
        ),
    ],
)
def test_activations_within_15_percent(arch, flags):
    layers = ["--encoder-layers", "2", "--decoder-layers", "2"]
    kept, model = kept_per_token(arch, [*flags, *layers])
    assert activation_elements(model) == pytest.approx(kept, rel=0.15)


def test_recomputation_and_activation_dropout():
    model = build_skeleton("moa_transformer_base", 100)
    whole = activation_elements(model)
    assert activation_elements(model, recompute=True) < whole / 5
    assert activation_elements(model, activation_dropout=True) == whole + 12 * 3072


@pytest.mark.parametrize(
    ("precision", "devices", "flags", "per_parameter"),
    [
        ("fp32", 1, {}, 16),
        ("amp", 1, {}, 16),
        ("fp16", 1, {}, 20),
        ("bf16", 8, {}, 22),
        ("fp16", 1, {"memory-efficient-fp16": True}, 12),
        ("bf16", 8, {"zero-sharding": "os"}, 22 - 7),
        ("fp16", 8, {"ddp-backend": "fully_sharded"}, 20 / 8),
    ],
)
def test_bytes_per_parameter(precision, devices, flags, per_parameter):
    model = build_skeleton("transformer_iwslt_de_en", 1000)
    memory = estimate_memory(model, 1000, 0, precision, devices, flags)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert (memory.total - memory.fixed) / count == pytest.approx(per_parameter, rel=1e-3)
