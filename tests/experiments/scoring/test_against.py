"""`score --against`: means, differences and p of two systems."""

import functools
import itertools
import json
import random
from pathlib import Path

import pytest
from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest
from scipy import stats

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring import score
from moa_fairseq.experiments.scoring.against import compare_systems
from moa_fairseq.experiments.scoring.chains import Texts, running_text


@pytest.fixture
def few_trials(monkeypatch):
    """Where p does not depend on them."""
    monkeypatch.setattr(score, "compare_systems", functools.partial(compare_systems, trials=20))


@pytest.fixture
def outputs(tmp_path):
    """A reference of 80 lines, and outputs that miss 20, 22 and 40 of 100 words."""
    draw = random.Random(3)
    reference = [" ".join(f"w{draw.randrange(40)}" for _ in range(9)) for _ in range(80)]
    paths = {"reference": tmp_path / "reference"}
    paths["reference"].write_text("\n".join(reference) + "\n")
    for name, missing in (("a", 0.2), ("b", 0.22), ("c", 0.4)):
        lines = [
            " ".join("x" if draw.random() < missing else w for w in line.split())
            for line in reference
        ]
        paths[name] = tmp_path / name
        paths[name].write_text("\n".join(lines) + "\n")
    return {name: str(path) for name, path in paths.items()}


def compared(capsys, outputs, ours, theirs):
    line = [
        "--hypothesis",
        *(outputs[name] for name in ours),
        "--reference",
        outputs["reference"],
    ]
    assert (
        main(["score", *line, "--against", *(outputs[name] for name in theirs), "--json"]) == 0
    )
    content = json.loads(capsys.readouterr().out)
    return {row["metric"]: row for row in content["metrics"]}, content


@pytest.mark.thorough(keep="[b]")
@pytest.mark.parametrize("other", ["b", "c"])
def test_it_says_what_sacrebleu_says_of_one_output_each(outputs, capsys, other):
    rows, content = compared(capsys, outputs, "a", other)
    assert content["sentences"] == 80 and content["outputs"] == [1, 1]
    texts = {name: Path(path).read_text().splitlines() for name, path in outputs.items()}
    metrics = {
        "BLEU": BLEU(lowercase=True, tokenize="none", force=True),
        "chrF": CHRF(lowercase=True),
    }
    systems = [("a", texts["a"]), (other, texts[other])]
    _, theirs = PairedTest(systems, metrics, [texts["reference"]], "ar", n_samples=10_000)()
    for name, row in rows.items():
        first, second = next(scores for key, scores in theirs.items() if key.startswith(name))
        assert (row["first"], row["second"]) == pytest.approx((first.score, second.score))
        assert row["p"] == pytest.approx(second.p_value, abs=0.02)
        assert row["difference"] == pytest.approx(first.score - second.score)


@pytest.mark.thorough
def test_seeds_are_averaged(outputs, capsys):
    rows, content = compared(capsys, outputs, "ab", "c")
    alone = [compared(capsys, outputs, name, "c")[0]["BLEU"]["first"] for name in "ab"]
    assert rows["BLEU"]["first"] == pytest.approx(sum(alone) / 2) and content["outputs"] == [
        2,
        1,
    ]
    assert rows["BLEU"]["p"] < 0.05 and "p_seeds" not in rows["BLEU"], (
        "three outputs are no pairs"
    )


@pytest.mark.thorough
def test_the_p_of_seeds_is_a_paired_t_test(outputs, capsys):
    ours, theirs = (
        [compared(capsys, outputs, x, "a")[0] for x in system] for system in ("abc", "cba")
    )
    found, _ = compared(capsys, outputs, "abc", "cba")
    for name, row in found.items():
        scores = [[each[name]["first"] for each in system] for system in (ours, theirs)]
        t_test = stats.ttest_rel(*scores)
        assert row["p_seeds"] == pytest.approx(t_test.pvalue)
        assert (row["low"], row["high"]) == pytest.approx(tuple(t_test.confidence_interval()))
    line = ["--hypothesis", outputs["a"], outputs["b"], "--reference", outputs["reference"]]
    assert main(["score", *line, "--against", outputs["c"], outputs["b"]]) == 0
    assert "95 %, seeds" in capsys.readouterr().out


def test_unequal_numbers_of_outputs_are_no_pairs(outputs):
    reference = Path(outputs["reference"]).read_text().splitlines()
    texts = {
        name: Texts(Path(outputs[name]).read_text().splitlines(), [reference]) for name in "abc"
    }
    texts = {name: running_text(text) for name, text in texts.items()}
    for row in compare_systems(
        [texts[name] for name in "abc"], [texts[name] for name in "ab"], trials=3
    )["metrics"]:
        assert "p_seeds" not in row and "low" not in row


def test_outputs_with_other_references_are_refused():
    texts = [running_text(Texts(["b b"], [[word]])) for word in "ab"]
    for first, second in (texts, texts[::-1]):
        with pytest.raises(UserError, match="other references"):
            compare_systems([first], [second])


def test_a_system_does_not_differ_from_itself(outputs, few_trials, capsys):
    rows, _ = compared(capsys, outputs, "a", "a")
    assert rows["BLEU"]["difference"] == 0 and rows["BLEU"]["p"] == 1


def test_several_outputs_need_others_to_be_compared_with(outputs, capsys):
    line = ["--hypothesis", outputs["a"], outputs["b"], "--reference", outputs["reference"]]
    assert main(["score", *line]) == 2 and "--against" in capsys.readouterr().err


def comparison_flags(outputs, other):
    """The flags that compare output a with another."""
    files = {
        "--hypothesis": outputs["a"],
        "--reference": outputs["reference"],
        "--against": other,
    }
    return list(itertools.chain.from_iterable(files.items()))


@pytest.mark.parametrize(
    "flag", [["--lowercase"], ["--chain", "multi-bleu"], ["--also", "moa-release"]]
)
def test_what_a_comparison_does_not_do_is_refused(outputs, capsys, flag):
    line = comparison_flags(outputs, outputs["b"])
    assert main(["score", *line, *flag]) == 2 and flag[0] in capsys.readouterr().err


def test_a_comparison_warns_as_a_score_does(few_trials, capsys, tmp_path):
    log = tmp_path / "generate.txt"
    log.write_text("".join(f"T-{n}\ta b c d\nH-{n}\t-0.1\ta b c d\n" for n in (0, 2)))
    assert main(f"score {log} --allow-partial --against {log}".split()) == 0
    said = capsys.readouterr().err
    assert (
        said.count("1 sentence of the test set is missing") == 2
        and said.count("--target-lang") == 2
    )


def test_only_one_test_set_can_be_compared(outputs, capsys, tmp_path):
    short = tmp_path / "short"
    short.write_text("one line\n")
    line = comparison_flags(outputs, str(short))
    assert main(["score", *line]) == 2 and str(short) in capsys.readouterr().err
