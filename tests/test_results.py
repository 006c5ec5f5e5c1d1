"""What results/ says, worked out again from its records."""

import hashlib
import itertools
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import study_pages
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from moa_fairseq.experiments.data.archives import contents
from moa_fairseq.experiments.recipes.loading import find_recipe, load_recipe
from moa_fairseq.experiments.study.design import runs_of
from moa_fairseq.experiments.study.loading import load_study
from moa_fairseq.experiments.study.pictures import draw
from moa_fairseq.experiments.study.records import records_of
from moa_fairseq.experiments.study.report import report
from moa_fairseq.experiments.study.report_text import as_text

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
PAGE = (RESULTS / "small-runs.md").read_text(encoding="utf-8")
DENSE = "multi30k_ende_transformer_tiny"
SECOND = "multi30k_ende_transformer_tiny_seed2"
MIXTURES = [f"multi30k_ende_moa_tiny{name}" for name in ("_4k4e64d", "", "_release")]
SETS = {"test_2016_flickr": "test", "test_2017_flickr": "test1", "test_2017_mscoco": "test2"}
STUDIES = sorted(path.parent.name for path in (RESULTS / "studies").glob("*/report.json"))
SIGNIFICANCE = json.loads(
    (RESULTS / "analysis" / "significance-multi30k.json").read_text(encoding="utf-8")
)


def record(name):
    return json.loads((RESULTS / "measured" / f"{name}.json").read_text(encoding="utf-8"))


def bleu(name):
    run = record(name)
    return {
        s: {"test": run["metrics"], **run["other_subsets"]}[key]["multi_bleu"]
        for s, key in SETS.items()
    }


def curve(name):
    """[epochs, 3]: the epoch, the training loss without smoothing, the validation loss with it, in bits."""
    path = RESULTS / "analysis" / "learning-curves" / f"{name}.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    train = {
        line["epoch"]: float(line["train_nll_loss"]) for line in lines if "train_loss" in line
    }
    valid = {line["epoch"]: float(line["valid_loss"]) for line in lines if "valid_loss" in line}
    return np.array(
        [(epoch, train[epoch], valid[epoch]) for epoch in sorted(train.keys() & valid.keys())]
    )


def cells(label):
    """The row of the protocol's table, "" left out."""
    (line,) = re.findall(rf"^\| {re.escape(label)} \|(.*)\|$", PAGE, re.M)
    return [cell.strip() for cell in line.split("|") if cell.strip()]


@pytest.mark.parametrize("test_set", SETS)
def test_the_scores_and_p_values_of_the_table(test_set):
    against = SIGNIFICANCE["sets"][test_set][DENSE]
    expected = [f"{bleu(DENSE)[test_set]:.2f}"]
    for name in (SECOND, *MIXTURES):
        p = against[name]["p_value"]
        expected += [
            f"{bleu(name)[test_set]:.2f}",
            f"{p:.2f}" if p >= 0.095 else f"{p:.2g}".ljust(5, "0"),
        ]
    assert cells(f"BLEU, {test_set}") == expected


def test_the_p_values_are_two_sided_and_of_these_outputs():
    assert "--paired-ar" in SIGNIFICANCE["command"] and "case:lc" in SIGNIFICANCE["signature"]
    assert "tok:none" in SIGNIFICANCE["signature"] and "--paired-bs" not in PAGE
    translated = contents(RESULTS / "outputs.tar.xz")
    for test_set, baselines in SIGNIFICANCE["sets"].items():
        for baseline, rows in baselines.items():
            for name, row in rows.items():
                assert f"{name}/{test_set}.de" in translated
                found = bleu(name)[test_set] - bleu(baseline)[test_set]
                # <unk> in a log's references
                assert row["difference"] == pytest.approx(found, abs=0.011)
    below = {
        baseline: sum(
            SIGNIFICANCE["sets"][s][baseline][name]["p_value"] < 0.05
            for s in SETS
            for name in MIXTURES
        )
        for baseline in (DENSE, SECOND)
    }
    assert below == {DENSE: 0, SECOND: 4}


def test_what_one_run_beside_two_cannot_show():
    """t with one degree of freedom is Cauchy's; one run less the mean of two has 1 + 1/2 variances."""
    one = bleu(DENSE)
    two = bleu(SECOND)
    apart = [abs(one[s] - two[s]) for s in SETS]
    least = [
        math.tan(math.pi * 0.475) * difference / math.sqrt(2) * math.sqrt(1.5)
        for difference in apart
    ]
    assert [f"{value:.1f}" for value in least] == ["2.7", "9.5", "5.2"]
    page = " ".join(PAGE.split())
    assert (
        "{:.2f}, {:.2f} and {:.2f} BLEU".format(*apart) in page
        and "2.7, 9.5 and 5.2 BLEU" in page
    )
    first = record(DENSE)
    second = record(SECOND)
    assert first["hardware"] != second["hardware"] and first["commit"] != second["commit"]


def test_the_losses_of_the_table():
    curves = {name: curve(name) for name in (DENSE, SECOND, *MIXTURES)}
    best = [found[found[:, 2].argmin()] for found in curves.values()]
    assert cells("lowest validation loss (epoch)") == [
        f"{row[2]:.3f} ({row[0]:.0f})" for row in best
    ]
    runs = [record(name) for name in curves]
    assert cells("epochs, updates") == [f"{run['epochs']}, {run['updates']:,}" for run in runs]
    assert cells("parameters") == [f"{run['parameters'] / 1e6:.2f}M" for run in runs]
    levels = np.linspace(1.7, 2.4, 8)
    at = {}
    for name, found in curves.items():
        order = found[:, 1].argsort()
        at[name] = np.interp(levels, found[order, 1], found[order, 2])
    behind = [f"{(at[name] - at[DENSE]).mean():+.3f}" for name in (SECOND, *MIXTURES)]
    assert cells("validation loss at equal training loss, minus dense") == behind


@pytest.mark.parametrize(
    "path", sorted((RESULTS / "measured").glob("*.json")), ids=lambda path: path.stem
)
def test_a_record_names_its_recipe_and_says_how_its_text_was_scored(path):
    run = record(path.stem)
    config = find_recipe(Path(re.search(r" recipe (\S+)", run["command"]).group(1)))
    changed = (
        "--set model.experts_per_token" in run["command"]
    )  # another model than the recipe's
    assert (run["experiment"] == config.stem) != changed
    signature = run["metrics"].get("sacrebleu_signature")
    if signature and load_recipe(config).data.lowercase:
        assert "case:lc" in signature and "tok:none" in signature


def test_a_studys_commands_are_not_of_one_machine():
    files = [*(RESULTS / "studies").rglob("*.json*")]
    found = [
        file.name
        for file in files
        if re.search(r"[ '=]/\w+/", file.read_text(encoding="utf-8"))
    ]
    assert files and not found


@pytest.mark.parametrize(
    "path", sorted(RESULTS.rglob("outputs.tar.xz")), ids=lambda path: path.parent.name
)
def test_the_translations_are_those_that_were_scored(path):
    texts = contents(path)
    lines = path.with_name("outputs.sha256").read_text(encoding="utf-8").splitlines()
    assert lines == [
        f"{hashlib.sha256(texts[name]).hexdigest()}  {name}" for name in sorted(texts)
    ]
    if path.parent != RESULTS:
        scored = {
            f"{system}-seed{seed}.{subset}.txt"
            for (system, seed), record in records_of(path.parent).items()
            for subset in record.content["metrics"]
        }
        assert scored == texts.keys()


def test_a_run_has_one_record():
    for path in (RESULTS / "studies").rglob("records.jsonl"):
        assert len(records_of(path.parent)) == len(
            path.read_text(encoding="utf-8").splitlines()
        )
    assert not list((RESULTS / "studies").rglob("*-seed[0-9]*.json"))


def study_of(name):
    return load_study(ROOT / "configs" / "studies" / f"{name}.yaml", RESULTS / "studies")


def report_of(name):
    return json.loads((RESULTS / "studies" / name / "report.json").read_text(encoding="utf-8"))


@pytest.mark.thorough(keep="control")
@pytest.mark.parametrize("name", STUDIES)
def test_a_report_is_made_of_the_records(name):
    """But for BLEU and chrF, for which one needs the references."""
    study = study_of(name)
    committed = report_of(name)
    content = report(study, runs_of(study, ROOT / "configs" / "studies", RESULTS / "studies"))
    if "translations" in committed:
        content["translations"] = committed["translations"]
    assert json.loads(json.dumps(content)) == committed
    page = (RESULTS / "studies" / name / "report.md").read_text(encoding="utf-8")
    assert as_text(study, content, markdown=True) == page


@pytest.mark.thorough(keep="translation")
@pytest.mark.parametrize("name", STUDIES)
def test_no_name_in_a_picture_is_missing_or_crosses_another_or_an_interval(name):
    study = study_of(name)
    content = report_of(name)
    for kind, figure in draw(study, content).items():
        (panel,) = figure.axes
        names = check_texts(figure, panel)
        if kind in ("branch", "cache"):
            assert names == {row["system"] for row in content["systems"]}


def check_texts(figure, panel):
    """That no text of a panel crosses another, an interval or the picture's edge. Returns names of points."""
    figure.draw_without_rendering()
    names = [text for text in panel.texts if text.get_visible()]
    texts = [*names, *figure.texts, panel.xaxis.label, panel.yaxis.label]
    for axis in (panel.xaxis, panel.yaxis):
        low, high = sorted(axis.get_view_interval())
        texts += [
            tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high
        ]
    boxes = [Text.get_window_extent(text) for text in texts if text.get_text()]
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    for box in boxes[: len(names)]:
        for bars in panel.collections:
            for bar in bars.get_segments():
                assert not box.overlaps(Bbox(panel.transData.transform(bar)))
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.width for box in boxes)
    return {text.get_text() for text in names}


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_has_a_page_with_five_sections(name):
    page = (RESULTS / "studies" / name / "README.md").read_text(encoding="utf-8")
    sections = ["Question", "Set-up", "Result", "What it does not show", "Departures"]
    assert re.findall(r"^## (.*)$", page, re.M) == sections


def test_the_picture_of_the_first_page_has_its_rows():
    rows = study_pages.first_rows()
    assert [row["first_screen"] for row in rows] == list(range(1, len(rows) + 1))
    assert study_pages.forest_in_file() == study_pages.forest_text(), (
        "run python docs/generate.py"
    )
    figure = study_pages.draw_forest()
    labels = []
    for panel in figure.axes:
        check_texts(figure, panel)
        labels += [label.get_text().replace("\n", " ") for label in panel.get_yticklabels()]
        means = [line.get_xdata()[0] for line in panel.lines if len(line.get_xdata()) == 1]
        drawn = [row for row in rows if row["part"] == panel.get_title(loc="left")]
        assert means == [row["measured"]["mean"] for row in drawn]
    assert labels == [f"{row['first_screen']}. {row['question']}" for row in rows]
