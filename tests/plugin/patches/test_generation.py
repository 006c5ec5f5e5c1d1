"""Flags of generation: what fairseq got wrong, on tiny models."""

import argparse

import pytest
import torch
from fairseq import checkpoint_utils, search
from fairseq.data import Dictionary
from fairseq.models import BaseFairseqModel
from fairseq.sequence_generator import SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.tasks.fairseq_task import FairseqTask

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.patches.user_errors import print_user_errors


def words(count=8):
    dictionary = Dictionary()
    for number in range(count):
        dictionary.add_symbol(f"w{number}")
    return dictionary


def pruned(**kept):
    state = {
        f"{side}.layers.{n}.fc1.weight": n for side in ("encoder", "decoder") for n in range(3)
    }
    settings = argparse.Namespace(arch="moa_transformer_tiny", **kept)
    return checkpoint_utils.prune_state_dict({**state, "encoder.embed.weight": 9}, settings)


def test_layers_of_one_side_leave_the_other_whole():
    for side, other in (("encoder", "decoder"), ("decoder", "encoder")):
        found = pruned(**{f"{side}_layers_to_keep": "0,2"})
        assert {key: found[key] for key in found if key.startswith(f"{side}.layers")} == {
            f"{side}.layers.0.fc1.weight": 0,
            f"{side}.layers.1.fc1.weight": 2,
        }
        assert [found[f"{other}.layers.{n}.fc1.weight"] for n in range(3)] == [0, 1, 2]
        assert found["encoder.embed.weight"] == 9


@pytest.mark.parametrize("kept", [0, 1])
def test_a_whole_number_is_one_layer(kept):
    found = pruned(decoder_layers_to_keep=kept)
    assert [value for key, value in found.items() if key.startswith("decoder")] == [kept]
    assert [found[f"encoder.layers.{n}.fc1.weight"] for n in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("kept", ["7", "x", "0,0", "-1", 3, 0.5, False])
def test_layers_that_are_not_there_are_refused_by_name(kept):
    with pytest.raises(UserError, match=r"--model-overrides.*decoder_layers_to_keep"):
        pruned(decoder_layers_to_keep=kept)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"sampling": True, "diversity_rate": 0.5}, "--sampling and --diversity-rate"),
        ({"beam": 4, "diverse_beam_groups": 3}, "--diverse-beam-groups 3"),
        ({"beam": 2, "nbest": 3}, "--nbest 3"),
        ({"print_step": True}, "--print-step"),
        ({"retain_iter_history": True}, "--retain-iter-history"),
    ],
)
def test_flags_that_do_not_go_together(flags, named):
    with pytest.raises(UserError, match=named):
        FairseqTask(None).build_generator([], argparse.Namespace(**flags))


def test_a_translator_is_no_language_model():
    lm = {"lm_model": torch.nn.Linear(1, 1), "lm_weight": 1.0}
    with pytest.raises(UserError, match=r"--lm-path lm\.pt"):
        flags = argparse.Namespace(lm_path="lm.pt")
        FairseqTask(None).build_generator([], flags, extra_gen_cls_kwargs=lm)


def test_a_choice_of_two_searches_is_the_error_that_fairseq_raises():
    with pytest.raises(ValueError, match="--match-source-len"):
        flags = argparse.Namespace(diverse_beam_groups=5, match_source_len=True)
        FairseqTask(None).build_generator([], flags)


@pytest.mark.parametrize("kind", [SequenceGenerator, SequenceGeneratorWithAlignment])
def test_diverse_groups_of_any_sentences(build_trainer, kind):
    """Numbers of sentences beyond the size of the batch; the search can still be exported."""
    trainer, (batch, *_) = build_trainer()
    models = [trainer.get_model().eval()]
    dictionary = trainer.task.target_dictionary
    strategy = search.DiverseBeamSearch(dictionary, 2, 0.5)
    generator = kind(models, dictionary, beam_size=4, max_len_b=5, search_strategy=strategy)
    rows = len(batch["id"])
    with torch.no_grad():
        expected, found = (
            generator.generate(models, {**batch, "id": ids})
            for ids in (torch.arange(rows), 100 + torch.randperm(rows))
        )
    assert [[h["tokens"].tolist() for h in each] for each in found] == [
        [h["tokens"].tolist() for h in each] for each in expected
    ]
    torch.jit.script(strategy)


def test_constraints_need_a_program_that_reads_them():
    constrained = search.LexicallyConstrainedBeamSearch(words(), "ordered")
    with pytest.raises(UserError, match=r"--constraints.*fairseq-interactive"):
        constrained.init_constraints(None, 2)


def test_fairseqs_checks_of_flags_are_one_paragraph(capsys):
    print_user_errors(AssertionError, AssertionError("--sampling requires --nbest"), None)
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and "--sampling requires --nbest." in said
        and "Traceback" not in said
    )
    print_user_errors(AssertionError, AssertionError("x is not y"), None)
    assert "AssertionError" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [torch.int32, torch.complex64])
def test_weights_of_another_kind_are_refused(kind):
    class Model(BaseFairseqModel):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.BatchNorm1d(3)  # which counts batches in an integer

    state = Model().state_dict()
    Model().load_state_dict(state)
    with pytest.raises(UserError, match=r"inner\.weight"):
        Model().load_state_dict({**state, "inner.weight": torch.ones(3, dtype=kind)})
