"""Averages against float64, tied weights, the choice of files, and what must be refused."""

import argparse
import os
import pickle
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.records import provenance
from moa_fairseq.experiments.scoring.average import average_checkpoints, last_checkpoints
from moa_fairseq.plugin.fairseq_compat import load_checkpoint


def model(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(5, 3, generator=generator).to(dtype)
    return OrderedDict(
        [
            ("embed", weight),
            ("fc", torch.randn(2, 2, generator=generator).to(dtype)),
            ("steps", torch.tensor([seed, -seed])),
            ("output", weight),  # tied to embed
        ]
    )


def save(path, weights, **more):
    state = {
        "args": None,
        "cfg": {"model": argparse.Namespace(arch="x")},
        "model": weights,
        "optimizer_history": [{"num_updates": 7}],
        "last_optimizer_state": {"state": torch.ones(100)},
        **more,
    }
    torch.save(state, path)
    return path


@pytest.fixture
def total(tmp_path):
    """total(*models): the mean of models, by way of files."""

    def mean(*models):
        files = [
            save(tmp_path / f"checkpoint{number}.pt", weights)
            for number, weights in enumerate(models)
        ]
        return average_checkpoints(files)["model"]

    return mean


@settings(max_examples=settings.default.max_examples // 4)
@given(st.data())
def test_an_average_is_the_mean_in_any_order(total, data):
    """Of copies of one checkpoint too, of large numbers, and of weights that are tied in some of them."""
    dtype = data.draw(
        st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
    )
    models = []
    for seed in data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=5)):
        weights = model(seed, dtype)
        weights["fc"] *= 2e4
        if data.draw(st.booleans()):
            weights["output"] = weights["output"] + 1.0
        models.append(weights)
    mean = total(*models)
    for key in models[0]:
        each = torch.stack([weights[key].double() for weights in models])
        if key == "steps":
            assert torch.equal(mean[key].double(), each.mean(0).floor())
            continue
        assert mean[key].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        exact = {"rtol": 0, "atol": 1e-6 * each.abs().max().item()}
        torch.testing.assert_close(mean[key].double(), each.mean(0), **exact)


def test_tied_weights_are_added_once_and_stay_tied(tmp_path):
    paths = [save(tmp_path / f"checkpoint{seed}.pt", model(seed)) for seed in (1, 2)]
    output = tmp_path / "average.pt"
    assert main(["average", "--inputs", *map(str, paths), "--output", str(output)]) == 0
    averaged = load_checkpoint(output)["model"]
    torch.testing.assert_close(averaged["output"], (model(1)["embed"] + model(2)["embed"]) / 2)
    assert averaged["output"].data_ptr() == averaged["embed"].data_ptr()
    assert list(averaged) == list(model(1))


def test_views_of_one_storage_that_differ_are_not_tied(total):
    storage = torch.arange(8.0)
    views = OrderedDict(
        a=storage[:4], b=storage[4:], c=storage.view(2, 4)[0], d=storage[:4].view(2, 2)
    )
    mean = total(views, views)
    assert mean["b"].tolist() == [4, 5, 6, 7]
    assert mean["d"].shape == (2, 2)


def test_settings_come_from_the_last_and_the_optimizer_is_dropped(tmp_path):
    first = save(tmp_path / "a.pt", model(1), extra_state={"epoch": 1})
    last = save(tmp_path / "b.pt", model(2), extra_state={"epoch": 2})
    state = average_checkpoints([first, last])
    assert state["extra_state"] == {"epoch": 2}
    assert state["cfg"]["model"].arch == "x"
    assert state["last_optimizer_state"] is None
    assert state["optimizer_history"] == [{"num_updates": 7}]
    assert state["averaged_from"] == ["a.pt", "b.pt"]


@pytest.mark.parametrize(
    "change, says",
    [
        ({"fc": torch.zeros(3, 2)}, r"b\.pt: fc has shape \[3, 2\], but \[2, 2\]"),
        ({"fc": None}, "b.pt lacks the parameter fc"),
        ({"more": torch.zeros(1)}, "b.pt alone has"),
    ],
)
def test_mixed_parameters_name_file_and_parameter(tmp_path, change, says):
    other = {**model(2), **change}
    other = {name: tensor for name, tensor in other.items() if tensor is not None}
    paths = [save(tmp_path / "a.pt", model(1)), save(tmp_path / "b.pt", other)]
    with pytest.raises(UserError, match=says):
        average_checkpoints(paths)


@pytest.fixture
def folder(tmp_path):
    names = [f"checkpoint{epoch}.pt" for epoch in (1, 2, 9, 10, 11)]
    names += ["checkpoint_1_500.pt", "checkpoint_2_1000.pt", "checkpoint_11_20000.pt"]
    names += [
        "checkpoint_best.pt",
        "checkpoint_last.pt",
        "checkpoint12.pt.tmp",
        "xcheckpoint13.pt",
    ]
    for name in names:
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (
            (3,),
            ["checkpoint9.pt", "checkpoint10.pt", "checkpoint11.pt"],
        ),  # by number, not by name
        ((2, False, 9), ["checkpoint2.pt", "checkpoint9.pt"]),
        ((2, True), ["checkpoint_2_1000.pt", "checkpoint_11_20000.pt"]),
        ((2, True, 1000), ["checkpoint_1_500.pt", "checkpoint_2_1000.pt"]),
    ],
)
def test_the_newest_checkpoints_are_chosen(folder, arguments, expected):
    assert [path.name for path in last_checkpoints(folder, *arguments)] == expected


def test_too_few_checkpoints(folder):
    with pytest.raises(
        UserError, match=r"holds 5 epoch checkpoints .* but 6 are to be averaged"
    ):
        last_checkpoints(folder, 6)
    with pytest.raises(UserError, match="holds 1 update checkpoints up to update 999"):
        last_checkpoints(folder, 2, True, 999)


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--inputs", "FOLDER"], "--num-epoch-checkpoints"),
        (["--inputs", "FOLDER", "--num-epoch-checkpoints", "1"], "at least two"),
        (["--inputs", "FOLDER/checkpoint1.pt"], "at least two"),
        (["--inputs", "FOLDER", "FOLDER", "--num-epoch-checkpoints", "2"], "one folder"),
        (["--inputs", "FOLDER/none", "--num-epoch-checkpoints", "2"], "is not a folder"),
        (["--inputs", "FOLDER/none.pt", "FOLDER/none.pt"], "none.pt does not exist"),
        (
            ["--inputs", "a.pt", "b.pt", "--checkpoint-upper-bound", "3"],
            "--checkpoint-upper-bound",
        ),
        (
            ["--inputs", "FOLDER/checkpoint1.pt", "FOLDER/checkpoint2.pt"],
            "checkpoint1.pt cannot be read",
        ),
    ],
)
def test_bad_input_ends_with_one_message(folder, capsys, flags, says):
    flags = [flag.replace("FOLDER", str(folder)) for flag in flags]
    assert main(["average", *flags, "--output", str(folder / "average.pt")]) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("\n") == 1
    assert not (folder / "average.pt").exists()


def test_truncated_checkpoint_leaves_an_older_average_alone(tmp_path, capsys):
    good = save(tmp_path / "a.pt", model(1))
    bad = tmp_path / "b.pt"
    bad.write_bytes(good.read_bytes()[:-200])
    output = tmp_path / "average.pt"
    output.write_bytes(b"older result")
    for inputs, force, says in (
        ((good, bad), ["--force"], "b.pt"),
        ((good, good), [], f"--output {output} exists"),
    ):
        assert (
            main(["average", "--inputs", *map(str, inputs), "--output", str(output), *force])
            == 2
        )
        assert says in capsys.readouterr().err
        assert output.read_bytes() == b"older result"
    assert main(f"average --inputs {bad} {bad} --output {tmp_path} --force".split()) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(f"average --inputs {good} {good} --output {output} --force".split()) == 0


def test_a_file_that_is_no_checkpoint(tmp_path):
    good = save(tmp_path / "a.pt", model(1))
    torch.save([1, 2], tmp_path / "b.pt")
    with pytest.raises(UserError, match=r"b\.pt is not a fairseq checkpoint"):
        average_checkpoints([good, tmp_path / "b.pt"])
    (tmp_path / "c.pt").write_bytes(pickle.dumps({"model": 1}, protocol=2))
    with pytest.raises(UserError, match=r"c\.pt"):
        average_checkpoints([good, tmp_path / "c.pt"])


@pytest.mark.parametrize("kind", ["input", "hard link", "best of the folder"])
def test_no_trained_checkpoint_is_overwritten(kind, tmp_path, capsys):
    paths = [save(tmp_path / f"checkpoint{number}.pt", model(number)) for number in (1, 2, 3)]
    best = save(tmp_path / "checkpoint_best.pt", model(4))
    before = {path: path.read_bytes() for path in (*paths, best)}
    inputs = [str(paths[1]), str(paths[2])]
    output = paths[2]
    if kind == "hard link":
        output = tmp_path / "average.pt"
        os.link(paths[1], output)
    elif kind == "best of the folder":
        inputs = f"{tmp_path} --num-epoch-checkpoints 2".split()
        output = best
    assert main(["average", "--inputs", *inputs, "--output", str(output)]) == 2
    assert f"--output {output} is the same file as the input" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before


def test_the_context_of_a_training_is_no_part_of_its_average(tmp_path):
    """It belongs to the text behind the last checkpoint, and may be larger than the model."""
    more = {"extra_state": {"epoch": 2, "carried_context": {"inputs": [torch.ones(9)]}}}
    paths = [save(tmp_path / f"{name}.pt", model(1), **more) for name in "ab"]
    assert average_checkpoints(paths)["extra_state"] == {"epoch": 2}


def settings(seed, old):
    common = {"seed": seed}
    if old:
        return {"args": argparse.Namespace(arch="x", **common), "cfg": None}
    return {"cfg": {"model": argparse.Namespace(arch="x"), "common": common}}


@pytest.mark.parametrize("old", [True, False])
def test_trainings_with_two_seeds_are_not_averaged(tmp_path, old):
    """Their models have the same shapes, and nothing in common."""
    same = [save(tmp_path / f"checkpoint{n}.pt", model(n), **settings(1, old)) for n in (1, 2)]
    average_checkpoints(same)
    other = save(tmp_path / "other.pt", model(3), **settings(2, old))
    with pytest.raises(UserError, match=r"checkpoint1\.pt.*seed 1.*other\.pt.*seed 2"):
        average_checkpoints([*same, other])


def test_an_average_says_what_made_it(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "commit", lambda: "abc")
    files = [str(save(tmp_path / f"checkpoint{n}.pt", model(n))) for n in (1, 2)]
    assert main(["average", "--inputs", *files, "--output", str(tmp_path / "average.pt")]) == 0
    made_by = load_checkpoint(tmp_path / "average.pt")["made_by"]
    assert made_by["commit"] == "abc" and made_by["versions"]["torch"] == torch.__version__
