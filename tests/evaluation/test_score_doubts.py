"""What `moa-fairseq score` finds out about each side by itself: subwords, tokenisation, unknown words."""

import json
from pathlib import Path

import pytest

from moa_fairseq.cli import main
from moa_fairseq.evaluation.score import join_subwords
from moa_fairseq.text import detokenize, normalize_punctuation, tokenize

RUNNING = [
    "Les « prix » de l'essence – déjà élevés – ont augmenté, dit-il.",
    "Qu'est-ce que c'est, « l'amour » ?",
    "Il n'y a pas d'autre choix, répond-elle, et c'est « bien ».",
]
TRANSLATED = [
    'Les "prix" de l\'essence - déjà très hauts - ont augmenté, dit-il.',
    "Qu'est-ce que c'est, \"l'amour\" ?",
    "Il n'y a pas d'autre choix, dit-elle, et c'est \"bon\".",
]
TOKENS, OUTPUT = ([tokenize(line, "fr", True) for line in lines] for lines in (RUNNING, TRANSLATED))


def bpe(line):
    return " ".join(f"{word[:2]}@@ {word[2:]}" if len(word) > 4 else word for word in line.split())


def pieces(line):
    return " ".join(f"\u2581{word[:2]} {word[2:]}".rstrip() for word in line.split())


def log_of(folder: Path, targets, outputs, decoded=None) -> str:
    rows = []
    for i, (target, output) in enumerate(zip(targets, outputs)):
        rows += [f"S-{i}\tx", f"T-{i}\t{target}", f"H-{i}\t-0.5\t{output}"]
        rows += [f"D-{i}\t-0.5\t{(decoded or outputs)[i]}"]
    rows.append("Generate test with beam=5: BLEU4 = 0.00")
    (folder / "log").write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    return str(folder / "log")


def files_of(folder: Path, hypotheses, references):
    argv = []
    for flag, lines in (("--hypothesis", hypotheses), ("--reference", references)):
        path = folder / flag.strip("-")
        path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        argv += [flag, str(path)]
    return argv


@pytest.fixture
def score(capsys):
    def score(*argv):
        assert main(["score", *argv, "--target-lang", "fr", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return score


def warnings_of(scores):
    return "\n".join(scores["meta"]["warnings"])


def numbers(scores):
    return {name: value for name, value in scores.items() if name != "meta"}


@pytest.mark.parametrize(
    "targets, outputs, kinds",
    [
        ([*map(bpe, TOKENS)], OUTPUT, ("none", ["subword_nmt"])),
        (TOKENS, [*map(bpe, OUTPUT)], ("subword_nmt", ["none"])),
        ([*map(pieces, TOKENS)], [*map(bpe, OUTPUT)], ("subword_nmt", ["sentencepiece"])),
    ],
)
def test_each_side_is_joined_by_its_own_marks(tmp_path, score, targets, outputs, kinds):
    whole = score(*files_of(tmp_path, OUTPUT, TOKENS))
    for argv in ([log_of(tmp_path, targets, outputs)], files_of(tmp_path, outputs, targets)):
        scores = score(*argv, "--remove-bpe", "auto")
        assert numbers(scores) == numbers(whole)
        assert scores["meta"]["subwords_joined"] == {"hypotheses": kinds[0], "references": kinds[1]}
        assert "subword" not in warnings_of(scores)


@pytest.mark.parametrize("split", [bpe, pieces])
def test_subwords_that_are_left_are_said(tmp_path, score, split):
    argv = files_of(tmp_path, OUTPUT, [*map(split, TOKENS)])
    doubt = warnings_of(score(*argv))
    assert "references still hold subwords" in doubt and "--remove-bpe auto" in doubt
    assert "subwords" not in warnings_of(score(*argv, "--remove-bpe", "auto"))
    assert "subwords" not in warnings_of(score(*files_of(tmp_path, ["a @@ b", "@-@ c"], ["a @@ b", "c"])))


def test_multi_bleu_of_running_text_is_doubted(tmp_path, score):
    both = warnings_of(score(*files_of(tmp_path, TRANSLATED, RUNNING)))
    assert "multi-bleu, compound-split: the hypotheses look untokenised" in both and "references look" in both
    one = warnings_of(score(*files_of(tmp_path, OUTPUT, RUNNING), "--chain", "moa-release"))
    assert "moa-release: the references look untokenised" in one
    for argv in (files_of(tmp_path, OUTPUT, TOKENS), files_of(tmp_path, ["a b"], ["a c"])):
        assert "tokenised" not in warnings_of(score(*argv))
    running = files_of(tmp_path, TRANSLATED, RUNNING)
    assert "tokenised" not in warnings_of(score(*running, "--chain", "sacrebleu", "--detokenized"))


def test_sacrebleu_of_tokens_taken_for_running_text_is_doubted(tmp_path, score):
    tokens = files_of(tmp_path, OUTPUT, TOKENS)
    doubt = warnings_of(score(*tokens, "--detokenized"))
    for side in ("hypotheses", "references"):
        assert f"sacrebleu: the {side} look tokenised" in doubt


def test_get_ende_bleu_wants_running_hypotheses_and_tokenised_references(tmp_path, score):
    chain = ("--chain", "get-ende-bleu")
    assert "tokenised" not in warnings_of(score(*files_of(tmp_path, TRANSLATED, TOKENS), *chain))
    doubt = warnings_of(score(*files_of(tmp_path, OUTPUT, RUNNING), *chain))
    assert "get-ende-bleu: the hypotheses look tokenised already" in doubt
    assert "get-ende-bleu: the references look untokenised" in doubt


def test_an_unknown_word_is_one_word_for_sacrebleu(tmp_path, score):
    """Training text is normalised, so « » and – of a test set are unknown; 13a made five words of each."""
    assert not set("«»–") & {sign for line in RUNNING for sign in normalize_punctuation(line, "fr")}
    targets = [
        " ".join("<<unk>>" if set(word) & set("«»–") else word for word in line.split()) for line in TOKENS
    ]
    assert sum(line.count("<<unk>>") for line in targets) == 8
    scores = score(log_of(tmp_path, targets, OUTPUT))
    exact = score(*files_of(tmp_path, OUTPUT, TOKENS))
    for chain in ("sacrebleu", "multi_bleu"):
        assert {**scores[chain], "chain": 0} == {**exact[chain], "chain": 0}
    # what the model does not know either is no match, and one word, too
    outputs = [line.replace("<<unk>>", "<unk>") for line in targets]
    assert score(log_of(tmp_path, targets, outputs))["sacrebleu"]["hyp_len"] == exact["sacrebleu"]["ref_len"]
    assert score(log_of(tmp_path, targets, outputs))["sacrebleu"]["score"] < 100


def test_french_text_survives_the_detokenizer():
    for line in RUNNING[:1] + TRANSLATED:
        assert detokenize(tokenize(line, "fr", True), "fr").replace(" ?", "?") == line.replace(" ?", "?")
    assert join_subwords(bpe(TOKENS[0]), "subword_nmt") == TOKENS[0]


def test_what_help_says_of_text_with_split_hyphens(tmp_path, score, capsys):
    """`tokenizer.perl -a` splits hyphens once, as compound splitting does; the release splits them again."""
    lines = ["der E-Mail-Server ist wohl-bekannt .", "ein Preis-Leistungs-Test , sagt er .", "gut ."]
    other = ["der Mail-Server ist wohl-bekannt .", "ein Preis-Leistung-Test , sagte er .", "gut ."]
    split = [[tokenize(line, "de", aggressive_hyphens=True) for line in side] for side in (other, lines)]
    scores = score(*files_of(tmp_path, *split), "--also", "moa-release")
    assert set(scores) == {
        *("multi_bleu", "compound_split_bleu", "sacrebleu", "moa_release_bleu", "meta"),
    }
    assert scores["moa_release_bleu"]["score"] > scores["multi_bleu"]["score"]
    once = [[line.replace(" @-@ ", "-").replace("-", " - ") for line in side] for side in split]
    expected = score(*files_of(tmp_path, *once))["multi_bleu"]["score"]
    assert scores["multi_bleu"]["score"] == pytest.approx(expected)
    with pytest.raises(SystemExit):
        main(["score", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "plain multi-bleu IS the score after one compound split" in text
