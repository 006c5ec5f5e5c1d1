"""A trained model for scoring: its device, its data, and the order of its batches."""

from types import SimpleNamespace

import pytest
import torch

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring import trained_model
from moa_fairseq.experiments.scoring.trained_model import batches, device_for, load_trained


@pytest.mark.parametrize(
    ("has_gpu", "cpu", "device"), [(0, 0, "cpu"), (1, 0, "cuda"), (1, 1, "cpu")]
)
def test_a_gpu_is_used_where_there_is_one(monkeypatch, has_gpu, cpu, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert device_for(cpu).type == device


def test_batches_come_in_a_fixed_order_whoever_asks(toy_masked_lm, toy_wiki_data):
    model, task = load_trained(toy_masked_lm, toy_wiki_data)
    samples = batches(task, model, "test", 120, torch.device("cpu"))
    found = [sample["id"].tolist() for sample in samples]
    iterator = task.get_batch_iterator(task.dataset("test"), max_tokens=120)
    assert found == [list(batch) for batch in iterator.frozen_batches] and len(found) > 3


@pytest.mark.parametrize("section", ["cfg", "args"])
def test_a_folder_of_the_training_that_is_gone_is_named(section, tmp_path, monkeypatch):
    checkpoint = tmp_path / "average.pt"
    checkpoint.touch()
    task = SimpleNamespace(data=f"{tmp_path}/gone:{tmp_path}")
    states = {"cfg": {"cfg": SimpleNamespace(task=task)}, "args": {"args": task}}
    monkeypatch.setattr(
        trained_model.checkpoint_utils, "load_checkpoint_to_cpu", lambda *_: states[section]
    )
    with pytest.raises(UserError, match=f"{tmp_path}/gone,.*--data"):
        load_trained(checkpoint, None)
