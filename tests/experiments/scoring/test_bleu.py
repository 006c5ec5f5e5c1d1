"""multi-bleu.perl and the chains around it: recorded lines, live Perl where there is one, and edges."""

import json
import math
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring.chains import Texts, multi_bleu, score, split_compounds

CASES = json.loads(
    (Path(__file__).parent / "multi_bleu_recorded.json").read_text(encoding="utf-8")
)
SCRIPTS = os.environ.get("MOSES_SCRIPTS")
SPLIT = "perl -ple 's{(\\S)-(\\S)}{$1 ##AT##-##AT## $2}g'"
PUNCTUATION = 'perl "$MOSES_SCRIPTS"/tokenizer/replace-unicode-punctuation.perl'
TOKENIZER = 'perl "$MOSES_SCRIPTS"/tokenizer/tokenizer.perl -q -l de'
PERL_CHAINS = {
    "multi-bleu": ("cat", "cat"),
    "compound-split": (SPLIT, SPLIT),
    "get-ende-bleu": (f"{PUNCTUATION} | {TOKENIZER} | {SPLIT}", SPLIT),
    "moa-release": (f"{PUNCTUATION} | {SPLIT}", f"{PUNCTUATION} | {SPLIT}"),
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['chain']}: {case['name']}")
def test_equals_recorded_perl(case):
    result = score(
        case["chain"], Texts(case["hypotheses"], case["references"]), case["lowercase"]
    )
    assert result["line"] == case["perl"]


def random_pair(seed):
    """Lines of hyphens, quotes, entities, spaces of every kind, other scripts and nothing at all."""
    rng = random.Random(seed)
    words = [
        "a-b-c",
        "d--e",
        "-",
        "x-",
        "&quot;",
        "&amp;",
        "'",
        "der",
        "Mann",
        "Haus",
        ".",
        "z.B.",
        "10.",
    ]
    words += ["Привет", "你好", "世界，", "مرحبا", "😀", "@-@", "ß-ß", "É", "１", "’"]
    words += ["a\u00a0-\u00a0b", "\u3000", "x\u3000y"]
    vocabulary = rng.sample(words, rng.choice([5, 12, len(words)]))

    def line():
        count = rng.randint(0, 20)
        return "".join(
            rng.choice(vocabulary) + rng.choice([" ", "  ", "\t"]) for _ in range(count)
        )

    hypotheses = [line() for _ in range(rng.choice([1, 8, 60]))]
    return hypotheses, [
        hypothesis if rng.random() < 0.5 else line() for hypothesis in hypotheses
    ]


@pytest.mark.skipif(
    not SCRIPTS or not shutil.which("perl"), reason="needs perl and MOSES_SCRIPTS"
)
@pytest.mark.parametrize("chain", PERL_CHAINS)
def test_equals_live_perl(chain, tmp_path):
    for seed in range(15):
        hypotheses, reference = random_pair(seed)
        for name, lines in (("hypotheses", hypotheses), ("reference", reference)):
            (tmp_path / name).write_bytes("".join(f"{line}\n" for line in lines).encode())
        on_hypotheses, on_reference = PERL_CHAINS[chain]
        command = (
            f"cat hypotheses | {on_hypotheses} > h; cat reference | {on_reference} > r; "
            'perl "$MOSES_SCRIPTS"/generic/multi-bleu.perl r < h'
        )
        perl = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True)
        assert (
            score(chain, Texts(hypotheses, [reference]))["line"] == perl.stdout.decode().strip()
        ), seed


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
