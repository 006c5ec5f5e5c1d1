"""multi-bleu.perl and the chains around it: lines that Perl gave, and edges."""

import json
import math
from pathlib import Path

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring.chains import Texts, multi_bleu, score, split_compounds

CASES = json.loads(
    (Path(__file__).parent / "multi_bleu_recorded.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['chain']}: {case['name']}")
def test_equals_recorded_perl(case):
    result = score(
        case["chain"], Texts(case["hypotheses"], case["references"]), case["lowercase"]
    )
    assert result["line"] == case["perl"]


def test_splitting_does_not_overlap():
    assert split_compounds("a-b-c") == "a ##AT##-##AT## b-c"
    assert split_compounds("d--e") == "d ##AT##-##AT## -e"
    assert split_compounds("x -y z- -") == "x -y z- -"
    assert split_compounds("a\u00a0-\u00a0b") == "a\u00a0 ##AT##-##AT## \u00a0b"


def test_release_splits_twice_what_is_split():
    lines = ["wohl @-@ bekannt und gut so"]
    found = [
        score(chain, Texts(lines, [lines]))["hyp_len"]
        for chain in ("multi-bleu", "moa-release")
    ]
    assert found == [6, 8]


def test_unequal_lengths_are_refused():
    with pytest.raises(UserError, match="2 hypotheses but 3 lines in reference 2"):
        multi_bleu(["a", "b"], [["a", "b"], ["a", "b", "c"]])


def test_values_by_hand():
    """Five words, of which four match, and one, two and one pairs, triples and quadruples; BP e^(1 - 6/5)."""
    found = multi_bleu(["a b c d x"], [["a b c d y z"]])
    assert found["precisions"] == [80.0, 75.0, pytest.approx(200 / 3), 50.0]
    expected = 100 * math.exp(-0.2) * (0.8 * 0.75 * 2 / 3 * 0.5) ** 0.25
    assert found["score"] == pytest.approx(expected, abs=1e-12)
    assert multi_bleu(["A\u00a0b c d e"], [["a\u00a0b c d e"]], lowercase=True)[
        "score"
    ] == pytest.approx(100)
    (precision, *_) = multi_bleu(["Ä b c d e"], [["ä b c d e"]], lowercase=True)["precisions"]
    assert precision == 80  # only ASCII letters are lowered
    assert multi_bleu(["", ""], [["a b", "c"]])["line"] == (
        "BLEU = 0.00, 0.0/0.0/0.0/0.0 (BP=0.000, ratio=0.000, hyp_len=0, ref_len=3)"
    )
    assert (
        "61.3/" in multi_bleu([" ".join("a" * 80)], [[" ".join("a" * 49 + "b" * 31)]])["line"]
    )


@pytest.mark.parametrize(("lowercase", "case"), [(True, "lower-cased"), (False, "cased")])
def test_a_chain_says_whether_case_counts(lowercase, case):
    chain = score("multi-bleu", Texts(["a b"], [["a b"]]), lowercase)["chain"]
    assert chain.rpartition(", ")[2] == case
