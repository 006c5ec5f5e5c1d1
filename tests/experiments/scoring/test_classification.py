"""The accuracy of a classifier is one over all sentences, or none."""

from types import SimpleNamespace

import pytest
import torch

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring import classification


class Classifier(torch.nn.Module):
    """Takes a sentence's number for its class, in evaluation: in training it would drop out."""

    classification_heads = ("head",)

    def forward(self, numbers, features_only, classification_head_name):
        assert not self.training
        return torch.nn.functional.one_hot(numbers, 3).float(), {}


@pytest.mark.parametrize("read", [1, 2, 3])
def test_a_sentence_that_was_not_read_is_missed(read, monkeypatch, tmp_path):
    samples = [
        {
            "net_input": {"numbers": torch.tensor([n])},
            "target": torch.tensor([[n % 2]]),
            "id": torch.tensor([n]),
        }
        for n in range(read)
    ]
    task = SimpleNamespace(
        label_dictionary={}, dataset=lambda subset: range(3), cfg=SimpleNamespace(data=tmp_path)
    )
    monkeypatch.setattr(classification, "load_trained", lambda *_: (Classifier(), task))
    monkeypatch.setattr(classification, "batches", lambda *_: samples)
    ask = lambda: classification.score(tmp_path / "x.pt", tmp_path, "test", 100, True)  # noqa: E731
    if read < 3:
        with pytest.raises(UserError, match=f"{3 - read} of 3 sentences"):
            ask()
    else:
        assert ask()["accuracy"]["score"] == pytest.approx(200 / 3)


@pytest.mark.parametrize("values, kept", [(10, True), (11, False)])
def test_a_result_keeps_the_accuracies_of_few_groups(values, kept, monkeypatch, tmp_path):
    task = SimpleNamespace(
        label_dictionary={},
        dataset=lambda subset: range(values),
        cfg=SimpleNamespace(data=tmp_path),
    )
    numbers = torch.zeros(values, dtype=torch.long)
    sample = {
        "net_input": {"numbers": numbers},
        "target": numbers[:, None],
        "id": torch.arange(values),
    }
    monkeypatch.setattr(classification, "load_trained", lambda *_: (Classifier(), task))
    monkeypatch.setattr(classification, "batches", lambda *_: [sample])
    (tmp_path / classification.GROUPS).mkdir()
    lines = ["depth", *map(str, range(values))]
    (tmp_path / classification.GROUPS / "test.tsv").write_text("\n".join(lines) + "\n")
    found = classification.score(tmp_path / "x.pt", tmp_path, "test", 100, True)
    assert len(found["accuracy"]["by"]["depth"]) == values
    by_depth = {str(depth): 100.0 for depth in range(values)} if kept else None
    assert found["meta"]["evaluation"].get("accuracy_by_depth") == by_depth
