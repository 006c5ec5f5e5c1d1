"""A study's tables of several contrasts, and of losses and bytes of cache."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring.significance import paired
from moa_fairseq.experiments.study import pictures, report
from moa_fairseq.experiments.study.design import Contrast, Study

LOSSES = {
    "A": {1: 3.00, 2: 3.10, 3: 2.90, 4: 3.05},
    "B": {1: 2.96, 2: 3.05, 3: 2.88, 4: 3.00},
    "C": {1: 3.001, 2: 3.099, 3: 2.901, 4: 3.053},
}
NEARLY = {
    1: 0.002,
    2: -0.007,
    3: 0.008,
    4: 0.001,
}  # differences: alone within the margin, p = 0.02
CONTRASTS = {name: Contrast(*name, "?") for name in ("BA", "CA", "BC")}


def test_verdicts_of_several_contrasts_are_corrected_for_their_number():
    """Holm: the smallest p counts as often as there are contrasts, the next one once less."""
    study = Study("toy", "?", 4, {}, CONTRASTS, margin=0.01)
    rows = report._contrasts(study, dict.fromkeys(CONTRASTS, LOSSES))
    for kind, adjusted in (("p", "p_holm"), ("p_equivalent", "p_equivalent_holm")):
        alone = {
            name: getattr(
                paired([LOSSES[name[0]][n] - LOSSES[name[1]][n] for n in (1, 2, 3, 4)], 0.01),
                kind,
            )
            for name in CONTRASTS
        }
        smallest, second, third = sorted(alone, key=alone.get)
        found = {row["contrast"]: row[adjusted] for row in rows}
        assert found[smallest] == pytest.approx(min(1, 3 * alone[smallest]))
        assert found[second] == pytest.approx(max(found[smallest], min(1, 2 * alone[second])))
        assert found[third] == pytest.approx(max(found[second], alone[third]))
        assert found[smallest] > alone[smallest]


def test_the_verdict_is_that_of_the_corrected_p():
    study = Study("toy", "?", 4, {}, CONTRASTS, margin=0.01)
    first = {seed: LOSSES["B"][seed] + difference for seed, difference in NEARLY.items()}
    losses = {"A": first, "B": LOSSES["B"], "C": first}
    rows = report._contrasts(study, {name: losses for name in CONTRASTS})
    (row,) = (row for row in rows if row["contrast"] == "BA")
    assert (
        row["p_equivalent"] < 0.05 < row["p_equivalent_holm"]
        and row["verdict"] == "equivalent before correction"
    )


def test_a_system_is_pareto_optimal_if_none_with_as_little_cache_is_better(tmp_path):
    """B is named before C, which is as small and better; the picture's line has only the Pareto front."""
    sizes = {"A": (256, 3.0), "B": (64, 3.2), "C": (64, 3.1), "D": (128, 3.3)}
    about = {name: {"system": name, "label": name, "family": ""} for name in sizes}
    systems = [
        {**about[name], "cache_bytes": size, "loss": bits, "by_seed": {1: bits, 2: bits**2}}
        for name, (size, bits) in sizes.items()
    ]
    study = Study(
        "toy", "?", 2, {name: SimpleNamespace(label=name) for name in sizes}, {}, margin=0.01
    )
    rows = report._cache(study, systems, tmp_path)
    optimal = [(row["system"], row["is_pareto_optimal"]) for row in rows]
    assert optimal == [("C", True), ("B", False), ("D", False), ("A", True)]
    content = {"systems": systems, "cache": rows}
    (panel,) = pictures._loss_against_cache(content, {"": ("black", "o")}).axes
    (line,) = (line for line in panel.lines if line.get_drawstyle() == "steps-post")
    np.testing.assert_allclose(line.get_xydata(), [(64, 0.1), (256, 0)])


def decoding(folder, stem="decoding-cpu", **values):
    """A file of benchmarks/decoding.py for A and B. A value of ... leaves its key out."""
    found = {
        "device": "cpu",
        "dtype": "float32",
        "seconds_per_token": {"1": {"A": 2.0, "B": 1.0}},
        **values,
    }
    found = {key: value for key, value in found.items() if value is not ...}
    (folder / f"{stem}.json").write_text(json.dumps(found))


@pytest.fixture
def cache(tmp_path):
    about = {"cache_bytes": 1, "loss": 3.0, "by_seed": {1: 3.0}}
    systems = [{"system": name, **about} for name in "AB"]
    study = Study("toy", "?", 1, {}, {})
    return lambda: report._cache(study, systems, tmp_path)


def test_times_of_several_dtypes_stand_beside_each_other(cache, tmp_path):
    decoding(tmp_path)
    for stem, device, dtype, ratio in (
        ("decoding-cpu-bfloat16", "cpu", "bfloat16", 0.25),
        ("decoding-cuda", "cuda", "bfloat16", 0.75),
        ("decoding-cuda-float32", "cuda", "float32", 0.125),
    ):
        seconds = {"1": {"A": 1.0, "B": ratio}}
        decoding(tmp_path, stem, device=device, dtype=dtype, seconds_per_token=seconds)
    (row,) = (row for row in cache() if row["system"] == "B")
    assert row["decoding"] == {
        "cpu, 1": 0.5,
        "cpu bfloat16, 1": 0.25,
        "cuda bfloat16, 1": 0.75,
        "cuda float32, 1": 0.125,
    }


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"device": ...}, "device"),
        ({"seconds_per_token": ...}, "seconds_per_token"),
        ({"seconds_per_token": [1]}, "seconds_per_token"),
        ({"seconds_per_token": {"16": 3}}, r"seconds_per_token\.16"),
        ({"seconds_per_token": {"16": {"A": 1}}}, r"seconds_per_token\.16.*\bB\b"),
        (
            {"seconds_per_token": {"16": {"A": 0, "B": 1}}},
            r"seconds_per_token\.16.*\bA\b.*\b0\b",
        ),
        ({"seconds_per_token": {"16": {"A": 1, "B": "x"}}}, r"seconds_per_token\.16.*\bB\b"),
        ({"dtype": 32}, "dtype"),
    ],
)
def test_a_damaged_file_of_decoding_times_is_named_with_the_key(cache, tmp_path, values, named):
    decoding(tmp_path, **values)
    with pytest.raises(UserError, match=rf"decoding-cpu\.json.*{named}"):
        cache()


def test_a_list_of_decoding_times_is_named(cache, tmp_path):
    (tmp_path / "decoding-cpu.json").write_text("[1]")
    with pytest.raises(UserError, match=r"decoding-cpu\.json"):
        cache()
