"""NumPy's numbers in checkpoints: saved as plain ones; those of older files are read without NumPy."""

import datetime
from collections import OrderedDict

import numpy as np
import pytest
import torch
from fairseq.logging.meters import AverageMeter, MetersDict

from moa_fairseq.errors import UserError
from moa_fairseq.plugin.fairseq_compat import load_checkpoint
from moa_fairseq.plugin.patches.checkpoint_writing import save_checkpoint
from moa_fairseq.plugin.patches.saved_numbers import MAX_BYTES, plain

NUMBERS = {
    "float64": (np.float64(0.1), 0.1),
    "float16": (np.float16(0.5), 0.5),
    "int64": (np.int64(-3), -3),
    "uint8": (np.uint8(200), 200),
    "bool": (np.bool_(True), True),
    "counts": (np.array([5, 0, 2]), [5, 0, 2]),
    "of the other order": (np.array([5, -1], dtype=">i4"), [5, -1]),
    "empty": (np.zeros(0), []),
    "empty rows": (np.zeros((2, 0), dtype="i4"), [[], []]),
    "no rows": (np.zeros((0, 3)), []),
    "by columns": (
        np.asfortranarray([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
        [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]],
    ),
}
WEIGHTS = {"w": torch.ones(2)}


@pytest.mark.parametrize("value, expected", NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_older_files_are_read_and_new_files_hold_plain_ones(
    tmp_path, value, expected
):
    state = {
        "model": WEIGHTS,
        "extra_state": {"best": value, "metrics": [(1, "x", {"sum": value})]},
    }
    torch.save(state, tmp_path / "old.pt")
    save_checkpoint(state, tmp_path / "new.pt")
    states = [load_checkpoint(tmp_path / name) for name in ("old.pt", "new.pt")]
    # Torch's own list of what is harmless
    states.append(torch.load(tmp_path / "new.pt", weights_only=True))
    for found in states:
        assert found["extra_state"] == {
            "best": expected,
            "metrics": [(1, "x", {"sum": expected})],
        }
        assert type(found["extra_state"]["best"]) is type(expected) or isinstance(
            expected, list
        )
    save_checkpoint(states[0], tmp_path / "again.pt")  # as an average of older files is
    assert (
        torch.load(tmp_path / "again.pt", weights_only=True)["extra_state"]["best"] == expected
    )


def test_all_else_is_saved_as_it_is():
    """A model's OrderedDict has versions beside it; a container may stand in several places, or in itself."""
    model = OrderedDict(WEIGHTS)
    model._metadata = {"": {"version": 1}}
    state = {
        "model": model,
        "twice": [[model["w"]]] * 2,
        "betas": (np.float32(0.5), 1),
        "shape": model["w"].shape,
    }
    state["itself"] = state
    found = plain(state)
    assert found["model"]._metadata == model._metadata and found["model"]["w"] is model["w"]
    assert found["twice"][0] is found["twice"][1] and found["itself"] is found
    assert found["betas"] == (0.5, 1) and isinstance(found["shape"], torch.Size)
    assert isinstance(state["betas"][0], np.float32)  # the training's own state stays
    deep = ["x"]
    for _ in range(100):
        deep = [deep, deep]
    found = plain(deep)
    assert found[0] is found[1]


class Reduced:
    """Unpickles as function(*arguments), and then gets a state."""

    def __init__(self, function, arguments, *state):
        self.reduced = (function, arguments, *state)

    def __reduce__(self):
        return self.reduced


def array(shape, dtype, raw, by_columns=False):
    """An array's pickle, with whatever stands in its parts."""
    reconstruct, first, _ = np.zeros(1).__reduce__()
    return Reduced(reconstruct, first, (1, shape, dtype, by_columns, raw))


def dtype(code, *state):
    return Reduced(np.dtype, (code, False, True), *state)


SCALAR = np.float64(1).__reduce__()[0]
F8 = np.dtype("f8")
MALICIOUS = {
    "objects": np.array([1, "x"], dtype=object),
    "texts": np.array(["x"]),
    "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "complex": np.complex128(1),
    "records": np.zeros(2, dtype=[("a", "i4")]),
    "too large": np.zeros(MAX_BYTES + 8, dtype=np.int8),
    "fewer bytes than numbers": array((1 << 40,), F8, b"\0" * 8),
    "endless rows of nothing": array((1 << 40, 0), F8, b""),
    "as many bytes as a number says": Reduced(bytes, (1 << 40,)),
    "negative": array((-1, -1), F8, b"\0" * 8),
    "no bytes": array((1,), F8, [1.0]),
    "no type": array((1,), "f8", b"\0" * 8),
    "a part of bytes": array((1,), F8, b"\0" * 7),
    "a type of objects": array((1,), dtype("O"), [1]),
    "a type with fields": array(
        (1,), dtype("f8", (3, "<", None, ("a",), {"a": (F8, 0)}, 8, 1, 0)), b"\0" * 8
    ),
    "an order that is none": array(
        (1,), dtype("f8", (3, "O", None, None, None, -1, -1, 0)), b"\0" * 8
    ),
    "two numbers as one": Reduced(SCALAR, (F8, b"\0" * 16)),
    "no number": Reduced(SCALAR, (F8, b"")),
    "another function of NumPy's": Reduced(np.zeros, ((1 << 40,),)),
    "a function of a submodule": Reduced(np.load, ("/dev/zero",)),
}


@pytest.mark.parametrize("value", MALICIOUS.values(), ids=MALICIOUS)
def test_whatever_is_no_plain_number_is_refused(tmp_path, value):
    path = tmp_path / "planted.pt"
    torch.save({"model": WEIGHTS, "extra_state": {"best": value}}, path)
    with pytest.raises(UserError, match=r"planted\.pt"):
        load_checkpoint(path)


def test_few_bytes_cannot_become_many_numbers(tmp_path):
    """One text of bytes stands in the file once, and in as many arrays as there are lines."""
    raw = b"\0" * (MAX_BYTES // 10)
    state = {
        "model": WEIGHTS,
        "extra_state": [array((len(raw),), np.dtype("i1"), raw) for _ in range(20)],
    }
    torch.save(state, tmp_path / "bomb.pt")
    assert (tmp_path / "bomb.pt").stat().st_size < 3 * len(raw)
    with pytest.raises(UserError, match=r"bomb\.pt was refused"):
        load_checkpoint(tmp_path / "bomb.pt")


def test_what_could_not_be_loaded_is_not_written(tmp_path):
    path = tmp_path / "checkpoint_last.pt"
    save_checkpoint({"model": WEIGHTS}, path)
    with pytest.raises(UserError, match=r"was not written.*datetime\.date"):
        save_checkpoint(
            {"model": WEIGHTS, "task_state": {"day": datetime.date(2020, 1, 1)}}, path
        )
    assert load_checkpoint(path).keys() == {"model"}
    assert [file.name for file in tmp_path.iterdir()] == ["checkpoint_last.pt"]


def test_a_meter_goes_on_with_the_array_that_was_saved(tmp_path):
    def meters():
        found = MetersDict()
        found.add_meter("_bleu_counts", AverageMeter(), 0)
        return found

    before = meters()
    after = MetersDict()
    before["_bleu_counts"].update(np.array([3, 1]))
    save_checkpoint(
        {"model": WEIGHTS, "extra_state": before.state_dict()}, tmp_path / "last.pt"
    )
    after.load_state_dict(load_checkpoint(tmp_path / "last.pt")["extra_state"])
    for each in (before, after):
        each["_bleu_counts"].update(np.array([10, 20]))
        assert np.array_equal(each["_bleu_counts"].sum, [13, 21])
        assert np.array_equal(each["_bleu_counts"].avg, [6.5, 10.5])


@pytest.mark.thorough
def test_a_training_with_all_that_adds_to_a_checkpoint_is_resumed(fairseq, toy_data, tmp_path):
    """In the middle of an epoch, where meters go on; then with all that is to be reset."""
    flags = [
        "--eval-bleu",
        "--eval-bleu-args",
        '{"beam": 1, "max_len_b": 5}',
        "--eval-bleu-print-samples",
    ]
    flags += [
        "--best-checkpoint-metric",
        "bleu",
        "--maximize-best-checkpoint-metric",
        "--report-accuracy",
    ]
    flags += [
        "--store-ema",
        "--ema-fp32",
        "--max-tokens",
        600,
        "--save-interval-updates",
        1,
        "--patience",
        9,
    ]
    flags += ["--no-epoch-checkpoints", "--keep-best-checkpoints", 2]
    fairseq.train(toy_data, tmp_path, *flags, "--max-update", 1)
    extra = load_checkpoint(tmp_path / "checkpoint_last.pt")["extra_state"]
    saved = {name: values for _, name, _, values in extra["metrics"]["valid"]}
    assert extra["train_iterator"]["iterations_in_epoch"] == 1
    assert type(extra["best"]) is float and len(saved["_bleu_counts"]["sum"]) == 4
    assert {"ema", "ema_fp32_params", "best", "val_loss"} <= extra.keys()
    done = fairseq.train(toy_data, tmp_path, *flags, "--max-update", 2)
    assert "Loading EMA fp32 params from checkpoint" in done.stdout + done.stderr
    last = load_checkpoint(tmp_path / "checkpoint_last.pt")
    assert last["optimizer_history"][-1]["num_updates"] == 2
    resets = [
        f"--reset-{name}" for name in ("optimizer", "lr-scheduler", "meters", "dataloader")
    ]
    fairseq.train(toy_data, tmp_path, *flags, *resets, "--max-update", 1)
    last = load_checkpoint(tmp_path / "checkpoint_last.pt")
    assert last["optimizer_history"][-1]["num_updates"] == 1
