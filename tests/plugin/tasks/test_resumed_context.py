"""A training with a carried context that stops in the middle of an epoch and goes on, bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from chunked_training import arguments

from moa_fairseq.experiments.scoring.average import average_checkpoints
from moa_fairseq.plugin.fairseq_compat import load_checkpoint
from moa_fairseq.plugin.tasks.language_modeling_truncated_bptt import TruncatedBPTTTask

# 17 chunks of 24 texts, twelve in a micro-batch: epochs of 17 updates. Validated and saved in mid-epoch.
LONG = 22
STOPS = (6, 19)
HABITS = ("--batch-size", 12, "--update-freq", 2)
HABITS += ("--validate-interval-updates", 4, "--save-interval-updates", 4)
HEADS = ("--decoder-attention-heads", 8, "--positions", "rope")
CASES = {
    "dense, bfloat16": ("transformer_xl_lm_tiny", ("--amp",)),
    "moa, two chunks": ("moa_lm_tiny", ("--carried-chunks", 2)),
    "switchall, rope": (
        "switchall_lm_tiny",
        ("--positions", "rope", "--sigma-moe-expert-dropout", 0.2),
    ),
    "moh": ("moh_transformer_lm_base", HEADS),
    "mae": ("mae_transformer_lm_base", (*HEADS, "--gate-window", 5)),
}


def different(one, two):
    """How many tensors of two checkpoints' models differ."""
    one, two = (
        load_checkpoint(folder / "checkpoint_last.pt")["model"] for folder in (one, two)
    )
    assert one.keys() == two.keys()
    return sum(not torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_context_equals_an_uninterrupted_one(fairseq, toy_text, tmp_path, case):
    arch, flags = CASES[case]
    for folder, update in (("whole", LONG), *(("parts", update) for update in (*STOPS, LONG))):
        line = (toy_text, tmp_path / folder, *HABITS, *flags, "--max-update", update)
        fairseq("train", *arguments(*line, arch=arch))
    assert different(tmp_path / "whole", tmp_path / "parts") == 0
    place = load_checkpoint(tmp_path / "parts" / "checkpoint_last.pt")["extra_state"][
        "train_iterator"
    ]
    assert place["epoch"] == 2 and 0 < place["iterations_in_epoch"] < 34


@pytest.mark.thorough
def test_each_of_two_processes_gets_its_own_texts_back(fairseq, toy_text, tmp_path):
    """And one process that takes over gets the texts of both."""
    for folder, update in (("whole", 20), ("parts", 9), ("parts", 20), ("alone", 9)):
        flags = ("--batch-size", 3, "--max-update", update)
        fairseq.together(*arguments(toy_text, tmp_path / folder, *flags))
    assert different(tmp_path / "whole", tmp_path / "parts") == 0
    path = tmp_path / "alone" / "checkpoint_last.pt"
    carried = load_checkpoint(path)["extra_state"]["carried_context"]
    assert [tuple(x.shape) for x in carried["inputs"]] == [(8, 6, 32)] * 2

    for update, flags in ((10, ()), (11, ("--batch-size", 3, "--update-freq", 2))):
        done = fairseq(
            "train", *arguments(toy_text, tmp_path / "alone", "--max-update", update, *flags)
        )
        said = done.stdout + done.stderr
        assert f"epoch 1 @ {update - 1} updates" in said and "is read without" not in said


def test_a_batch_that_only_takes_part_has_no_place_in_the_texts(monkeypatch):
    seen = []
    monkeypatch.setattr(
        "fairseq.tasks.language_modeling.LanguageModelingTask.train_step",
        lambda task, sample, *args: seen.append(set(sample["net_input"])),
        raising=False,
    )
    task = TruncatedBPTTTask.__new__(TruncatedBPTTTask)
    sample = {"net_input": {"tokens": 1, "chunk": 0, "part": 0}}
    for fills in (False, True):
        task.train_step(sample, None, None, None, 3, ignore_grad=fills)
    assert seen == [{"tokens", "chunk", "part"}, {"tokens"}]


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_training_goes_on_with_as_many_chunks_as_it_carries_now(chunks):
    """Its checkpoint holds the inputs of two chunks of three tokens."""
    restored = {}
    context = SimpleNamespace(chunks=chunks, restore=restored.__setitem__)
    trainer = SimpleNamespace(
        get_model=lambda: SimpleNamespace(decoder=SimpleNamespace(context=context)),
        device="cpu",
    )
    ordered = SimpleNamespace(
        parts=1, texts=2, texts_per_part=2, chunks=9, parts_of=lambda *shard: range(1)
    )
    place = SimpleNamespace(dataset=ordered, num_shards=1, shard_id=0, iterations_in_epoch=4)
    task = TruncatedBPTTTask.__new__(TruncatedBPTTTask)
    task.args = SimpleNamespace(tokens_per_sample=3)
    inputs = torch.arange(24.0).view(6, 2, 2)
    carried = {"texts": 2, "chunks": 9, "length": 3, "chunk": 3, "inputs": [inputs]}
    task.after_load(trainer, place, {"carried_context": carried})
    assert restored[0].chunk == 3 and torch.equal(restored[0].inputs[0], inputs[-3 * chunks :])


@pytest.mark.thorough
def test_a_checkpoint_of_before_resumes_with_a_warning(fairseq, toy_text, tmp_path):
    def train(*flags):
        line = arguments(
            toy_text, tmp_path, "--save-interval-updates", 2, "--max-update", *flags
        )
        done = fairseq("train", *line)
        return done.stdout + done.stderr

    train(4)
    last = tmp_path / "checkpoint_last.pt"
    numbered = [tmp_path / f"checkpoint_1_{n}.pt" for n in (2, 4)]
    assert "carried_context" not in average_checkpoints(numbered)["extra_state"]
    state = load_checkpoint(last)
    carried = state["extra_state"].pop("carried_context")
    assert (carried["chunk"], carried["texts"], carried["chunks"], carried["length"]) == (
        3,
        6,
        67,
        8,
    )
    torch.save(state, last)
    without = train(5)
    torch.save(
        {**state, "extra_state": {**state["extra_state"], "carried_context": carried}}, last
    )
    cut_anew = train(5, "--batch-size", 5)
    assert "the checkpoint holds none" in without and "cut otherwise" in cut_anew
