"""A study's tables of several contrasts, and of losses and bytes of cache."""

import json
import re
import statistics
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from played_study import (
    RECIPE,
    STUDY,
    Player,
    changed,
    record_of,
    report_of,
    without,
)

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring.complexity import complexity
from moa_fairseq.experiments.scoring.significance import paired
from moa_fairseq.experiments.study import pictures, report
from moa_fairseq.experiments.study.design import Contrast, Study
from moa_fairseq.experiments.study.records import records_of
from moa_fairseq.process import flags

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


def test_losses_are_paired_by_seed_whatever_their_order():
    """A diverged run is listed last; a seed of one system alone has no pair."""
    losses = {"A": LOSSES["A"] | {5: 3.2}, "B": dict(reversed(LOSSES["B"].items()))}
    (row,) = report._contrasts(Study("toy", "?", 5, {}, CONTRASTS, margin=0.01), {"BA": losses})
    differences = [LOSSES["B"][seed] - LOSSES["A"][seed] for seed in (1, 2, 3, 4)]
    expected = paired(differences, 0.01)._asdict()
    assert {key: row[key] for key in expected} == expected


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


def test_a_seed_that_is_not_complete_does_not_count(study, picture_names, capsys):
    Player.end = 1
    study()
    assert study("--report")[0] == 2, "no seed is complete"
    Player.end = 7
    _, records = study()
    whole = report_of(study)
    assert picture_names() == {"differences", "contrasts", "branch"}
    assert (whole["runs"], whole["planned"]) == (6, 8) and "seed 4" in capsys.readouterr().out
    assert [row["n"] for row in (*whole["systems"], *whole["contrasts"])] == [3, 3, 3]
    for row in whole["systems"]:  # of the seeds that are a sample
        assert row["deviation"] == pytest.approx(statistics.stdev(row["by_seed"].values()))
    without(records, "A-seed2")
    assert sorted(report_of(study)["systems"][1]["by_seed"]) == ["1", "3"]


def test_speeds_are_compared_within_a_seed(study):
    _, records = study()
    for seed, speed in enumerate(((100, 50), (900, 675), (10, 2), (1000, 900)), 1):
        for system, tokens_per_second in zip("AB", speed):
            changed(records, f"{system}-seed{seed}", tokens_per_second=tokens_per_second)
    assert [row["speed"] for row in report_of(study)["systems"]] == [
        1.0,
        pytest.approx((0.5 + 0.75) / 2),
    ]


def test_a_seed_that_one_system_has_alone_has_no_speed():
    speeds = {("A", 1): 100, ("B", 1): 50, ("B", 2): 70, ("A", 3): 0, ("B", 3): 60}
    found = [
        {"system": key, "seed": n, "tokens_per_second": speed}
        for (key, n), speed in speeds.items()
    ]
    assert report._speed([row for row in found if row["system"] == "B"], "A", found) == 0.5


def test_a_diverged_run_is_the_worst_and_stays(study):
    Player.diverges = ("B-seed3",)
    study()
    study()
    assert Player.ran.count("B-seed3") == 1
    systems = {row["system"]: row for row in report_of(study)["systems"]}
    assert systems["B"]["diverged"] == 1
    assert systems["B"]["by_seed"]["3"] == max(systems["A"]["by_seed"].values())


def test_a_report_says_how_large_each_attention_starts(study):
    small = {**STUDY["systems"]["B"], "set": {"model.flags.attention-branch-scale": 0.25}}
    changes = {"systems": {**STUDY["systems"], "B": small}}
    study(**changes)
    dense, quarter = (row["branch"] for row in report_of(study, **changes)["systems"])
    assert quarter / dense == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize("said", [{}, {"train.flags.tokens-per-sample": 64}])
def test_a_language_model_is_counted_with_the_length_that_it_is_trained_with(study, said):
    """fairseq takes 1,024 tokens where a recipe names no number."""
    study(set=said)
    (row, _) = report_of(study, set=said)["systems"]
    length = said.get("train.flags.tokens-per-sample", 1024)
    model = yaml.safe_load(RECIPE)["model"]
    cost = complexity(model["arch"], 1000, length, length, "shared", flags(model["flags"]))
    assert row["attention_macs"] == cost.attention_macs


def test_bits_stand_beside_bytes_of_cache(study, picture_names, tmp_path, capsys):
    """B has one of A's four key heads and fewer bits; C has two and more bits than both."""
    systems = {**STUDY["systems"], "C": {"label": "between", "recipe": "../tiny.yaml"}}
    for name, heads in (("B", 1), ("C", 2)):
        systems[name] = {**systems[name], "set": {"model.flags.key-heads": heads}}
    study(systems=systems)
    for seed in (1, 2, 3, 4):
        curve = record_of(Path("results/studies/toy"), f"C-seed{seed}")["curve"]
        worse = [{**row, "valid": row["valid"] + 0.1} for row in curve]
        changed(Path("results/studies/toy"), f"C-seed{seed}", curve=worse)
    seconds = {"A": 0.2, "B": 0.1}
    measured = tmp_path / "results/studies/toy/decoding-cpu.json"
    measured.write_text(json.dumps({"device": "cpu", "seconds_per_token": {"1": seconds}}))
    assert study("--report", systems=systems)[0] == 2
    assert re.search(
        r"decoding-cpu\.json: seconds_per_token\.1 .*\bC\b", capsys.readouterr().err
    )
    seconds["C"] = 0.3
    measured.write_text(json.dumps({"device": "cpu", "seconds_per_token": {"1": seconds}}))
    found = report_of(study, systems=systems)
    rows = found["cache"]
    assert [(row["system"], row["cache_bytes"], row["is_pareto_optimal"]) for row in rows] == [
        ("B", 64, True),  # keys and values of 16 numbers, two bytes each
        ("C", 128, False),
        ("A", 256, False),
    ]
    assert rows[0]["mean"] == found["contrasts"][0]["mean"] < 0 < rows[1]["mean"]
    assert "mean" not in rows[2], "the first system itself"
    assert [row["decoding"]["cpu, 1"] for row in rows] == pytest.approx([0.5, 1.5, 1])
    text = Path("results/studies/toy/report.md").read_text()
    assert "0.50 (cpu, 1)" in text and re.search(r"^\| B .*\| yes \|$", text, re.MULTILINE)
    assert "cache" in picture_names()


def test_a_report_of_the_first_seeds_stands_beside_that_of_all(study):
    _, records = study()
    whole = report_of(study)
    assert study("--report", "--seeds", "3")[0] == 0
    (contrast,) = json.loads((records / "report-3-seeds.json").read_text())["contrasts"]
    assert contrast["n"] == 3 and whole == json.loads((records / "report.json").read_text())
    assert study("--report", "--seeds", "4")[0] == study("--report", "--seeds", "1")[0] == 0
    alone = json.loads((records / "report-1-seeds.json").read_text())
    assert alone["contrasts"] == [] and alone["systems"][0]["deviation"] is None
    assert study("--report", "--seeds", "0")[0] == study("--report", "--seeds", "9")[0] == 2
    assert study("--seeds", "3")[0] == 2


@pytest.mark.thorough
def test_a_report_scores_the_recorded_translations(study, tmp_path, capsys):
    pairs = {
        "experiment": "pairs",
        "summary": "translations",
        "data": {"recipe": "tatoeba", "source": "en", "target": "de", "bpe": 100},
        "model": {"arch": "dense_transformer_tiny"},
        "train": {"criterion": "cross_entropy", "max_tokens": 16, "max_update": 4},
        "generate": {"subsets": ["test"], "beam": 1},
    }
    (tmp_path / "configs" / "pairs.yaml").write_text(json.dumps(pairs))
    systems = {name: {"label": name, "recipe": "../pairs.yaml"} for name in "AB"}
    _, records = study(systems=systems)
    target = [f"Das ist der Satz {n} von allen ." for n in range(30)]
    references = tmp_path / "test.de"
    references.write_text("".join(f"{line}\n" for line in target))
    (records / "outputs").mkdir()
    for name, words in (("A", 4), ("B", 7)):
        for seed in (1, 2, 3):
            lines = "".join(
                " ".join(line.split()[: words + (n % (seed + 1) == 0)]) + "\n"
                for n, line in enumerate(target)
            )
            (records / "outputs" / f"{name}-seed{seed}.test.txt").write_text(lines)
    assert study("--report", "--references", str(references), systems=systems)[0] == 0
    loose = (records / "report.json").read_text()
    assert study("--pack", systems=systems)[0] == 0 and not (records / "outputs").exists()
    assert study("--report", "--references", str(references), systems=systems)[0] == 0
    assert (records / "report.json").read_text() == loose, "packed they say the same"
    rows = json.loads(loose)["translations"]
    assert [(row["metric"], row["n"]) for row in rows] == [("BLEU", 3), ("chrF", 3)]
    for row in rows:
        assert row["low"] < row["difference"] < row["high"] and row["difference"] > 5
        assert row["p_holm"] == row["p"] < 0.01 and row["p_seeds_holm"] == row["p_seeds"] < 0.05
        assert row["signature"] in (records / "report.md").read_text()
    assert "case:mixed" in rows[0]["signature"]
    references.write_text(target[0])
    assert study("--report", "--references", str(references), systems=systems)[0] == 2
    assert "--references" in capsys.readouterr().err
    assert study("--references", str(references))[0] == 2, "without --report"
    assert study("--report", "--references", str(references))[0] == 2, "a language model"


def test_a_report_says_where_runs_differ_in_more_than_the_system(study, capsys):
    _, records = study()
    capsys.readouterr()
    report_of(study)
    assert "unequal" not in (said := capsys.readouterr()).out + said.err
    before = record_of(records, "B-seed2")
    for key in ("hardware", "precision", "commit"):
        changed(records, "B-seed2", **{**before, key: "another one"})
        found = report_of(study)
        said = capsys.readouterr()
        (line,) = (line for line in (said.out + said.err).splitlines() if "unequal" in line)
        assert key in line and before[key] in line and ("seed 2" in line) == (key != "commit")
        assert found["runs"] == 8 and len(found["made_by"][key]) == 2


@pytest.mark.parametrize("flag", ["user-dir", "user-di"])
def test_a_report_runs_nothing_that_a_study_brings(study, tmp_path, capsys, flag):
    _, records = study()
    (tmp_path / "trap").mkdir()
    (tmp_path / "trap" / "__init__.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')")
    planted = {**STUDY["systems"]["A"], "set": {f"model.flags.{flag}": str(tmp_path / "trap")}}
    for system, seed in list(
        records_of(records)
    ):  # a stranger's records fit the stranger's study
        settings = record_of(records, f"{system}-seed{seed}")["settings"]
        settings = {**settings, f"model.flags.{flag}": str(tmp_path / "trap")}
        if system == "A":
            changed(records, f"A-seed{seed}", settings=settings)
    systems = {"A": planted, "B": STUDY["systems"]["B"]}
    assert study("--report", systems=systems)[0] == 2
    assert flag in capsys.readouterr().err and not (tmp_path / "marker").exists()
