"""Classifiers of sentences: their sizes, what padding may not change, and batches of like lengths."""

import numpy
import pytest
import torch
import whole_models
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq_cli import preprocess

from moa_fairseq.layers.switchhead import SwitchHeadAttention
from moa_fairseq.plugin.forward_context import collect_routings
from moa_fairseq.plugin.tasks.sentence_prediction_by_length import (
    SentencePredictionByLengthTask,
)

PAD = 1
ARCHS = (
    "switchhead_roberta_listops",
    "transformer_xl_roberta_listops",
    "transformer_xl_roberta_listops_2heads",
)


def build(arch):
    model = whole_models.build(arch, "--max-positions", 64, symbols=20)
    model.register_classification_head("head", num_classes=10)
    return model.eval()


def test_the_three_models_have_the_same_number_of_parameters():
    counts = [sum(p.numel() for p in build(arch).parameters()) for arch in ARCHS]
    assert max(counts) - min(counts) < 0.001 * max(counts)


@pytest.mark.parametrize(("arch", "heads"), zip(ARCHS, (2, 8, 2)))
def test_heads_and_layers(arch, heads):
    mixtures = [
        module for module in build(arch).modules() if isinstance(module, SwitchHeadAttention)
    ]
    assert len(mixtures) == 6 and {module.num_heads for module in mixtures} == {heads}
    assert {module.experts for module in mixtures} == {
        "vo" if arch.startswith("switchhead") else ""
    }


@pytest.mark.parametrize("arch", ARCHS[:2])
def test_the_class_depends_on_every_token_and_on_no_padding(arch):
    model = build(arch).double()
    tokens = torch.randint(4, 20, (1, 12), generator=torch.Generator().manual_seed(1))
    tokens[0, 0], tokens[0, -1] = 0, 2

    def classes(x):
        with torch.no_grad(), collect_routings() as decisions:
            out = model(x, features_only=True, classification_head_name="head")[0]
        # Two sides of six layers
        assert len(decisions) == (12 if arch.startswith("switchhead") else 0)
        return out

    expected = classes(tokens)
    padded = torch.cat([tokens, torch.full((1, 5), PAD)], dim=1)
    assert torch.allclose(classes(padded), expected, atol=1e-10)
    for place in range(1, 11):
        other = tokens.clone()
        other[0, place] = 4 + (other[0, place] - 3) % 16
        assert not torch.allclose(classes(other), expected, atol=1e-10)
    turned = tokens.clone()
    turned[0, 1:11] = tokens[0, 1:11].flip(0)
    assert not torch.allclose(classes(turned), expected, atol=1e-10)


def test_batches_by_length_have_less_padding(tmp_path):
    generator = numpy.random.default_rng(1)
    lengths = generator.integers(1, 40, 200)
    texts = {"input0": [" ".join("a" * n) for n in lengths], "label": ["0"] * 200}
    for name, lines in texts.items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
        words = [
            "--only-source",
            "--trainpref",
            tmp_path / name,
            "--destdir",
            tmp_path / "bin" / name,
        ]
        preprocess.main(
            options.get_preprocessing_parser().parse_args([str(word) for word in words])
        )
    flags = [
        "--num-classes",
        "1",
        "--arch",
        "roberta_tiny",
        "--criterion",
        "sentence_prediction",
    ]
    padding = {}
    for task in ("sentence_prediction", "sentence_prediction_by_length"):
        parser = options.get_training_parser()
        args = options.parse_args_and_arch(
            parser, [str(tmp_path / "bin"), "--task", task, *flags]
        )
        built = tasks.setup_task(convert_namespace_to_omegaconf(args).task)
        assert isinstance(built, SentencePredictionByLengthTask) == task.endswith("length")
        data = built.load_dataset("train")
        batches = built.get_batch_iterator(data, max_tokens=400).next_epoch_itr(shuffle=False)
        found = [sample["net_input"]["src_tokens"] for sample in batches]
        assert sum(len(tokens) for tokens in found) == 200
        padding[task] = sum(int(tokens.eq(PAD).sum()) for tokens in found)
    assert padding["sentence_prediction_by_length"] < 0.2 * padding["sentence_prediction"]
