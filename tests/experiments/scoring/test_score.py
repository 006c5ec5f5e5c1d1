"""`moa-fairseq score` through its command line: keys, chains, subwords, what it doubts, bad input."""

import json
import sys

import pytest
import sacrebleu
from fairseq.data import data_utils

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.scoring import chains
from moa_fairseq.experiments.scoring.text_marks import subword_kind
from moa_fairseq.text.steps import detokenize, normalize_punctuation, tokenize
from moa_fairseq.text.subwords import join_subwords

TARGETS = [
    "ein &quot; wohl @-@ bekannter &quot; Mann &amp; seine a-b-Frau .",
    "das ist gut , sagte er .",
]
OUTPUTS = [
    "ein &quot; wohl @-@ bekannter &quot; Mann &amp; die a-b-Frau .",
    "das ist gut , sagte sie .",
]
RAW_TARGETS = ['ein "wohl-bekannter" Mann & seine a-b-Frau.', "das ist gut, sagte er."]
RAW_OUTPUTS = ['ein "wohl-bekannter" Mann & die a-b-Frau.', "das ist gut, sagte sie."]
END = "Generate test with beam=5: BLEU4 = 0.00, ...\n"


def write_log(path, targets=TARGETS, outputs=OUTPUTS, decoded=None, end=END):
    rows = []
    for i, (target, output) in enumerate(zip(targets, outputs)):
        rows += [f"S-{i}\tsource", f"T-{i}\t{target}", f"H-{i}\t-0.5\t{output}"]
        rows += [f"D-{i}\t-0.5\t{(decoded or outputs)[i]}", f"P-{i}\t-0.5"]
    path.write_text("\n".join(rows) + "\n" + end, encoding="utf-8")
    return str(path)


def write_text(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def score_json(capsys, *argv):
    assert main(["score", *argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_log_has_the_three_scores(tmp_path, capsys):
    scores = score_json(capsys, write_log(tmp_path / "log"))
    assert set(scores) == {"multi_bleu", "compound_split_bleu", "sacrebleu", "meta"}
    for key in ("multi_bleu", "compound_split_bleu", "sacrebleu"):
        assert {"score", "precisions", "bp", "hyp_len", "ref_len"} <= set(scores[key])
    assert scores["multi_bleu"]["hyp_len"] == 18
    # a-b-Frau becomes three tokens, and the same for the hyphen that the tokenizer has already split.
    assert scores["compound_split_bleu"]["hyp_len"] == 18 + 2 + 2
    assert any("@-@" in warning for warning in scores["meta"]["warnings"])
    expected = sacrebleu.corpus_bleu(RAW_OUTPUTS, [RAW_TARGETS])
    assert scores["sacrebleu"]["score"] == pytest.approx(expected.score)
    assert (
        "tok:13a" in scores["sacrebleu"]["signature"]
        and "case:mixed" in scores["sacrebleu"]["signature"]
    )
    assert scores["meta"]["lines"] == 2 and scores["meta"]["hypothesis_lines"] == "H"


@pytest.mark.parametrize("running", [False, True])
def test_a_signature_tells_that_a_text_is_lower_cased(tmp_path, capsys, running):
    """Tokens of lower-cased text cannot be made running text again: they are scored as they are."""
    texts = (RAW_OUTPUTS, RAW_TARGETS) if running else (OUTPUTS, TARGETS)
    names = [
        write_text(tmp_path / side, [line.lower() for line in text])
        for side, text in zip("hr", texts)
    ]
    argv = ["--hypothesis", names[0], "--reference", names[1], *["--detokenized"] * running]
    found = score_json(capsys, *argv)
    signature = set(found["sacrebleu"]["signature"].split("|"))
    assert {"case:lc", "tok:13a" if running else "tok:none"} < signature
    if not running:
        assert found["sacrebleu"]["score"] == pytest.approx(
            found["multi_bleu"]["score"], abs=1e-9
        )
    for side in (0, 1):  # one cased side: the case counts
        lines = [line.lower() for line in texts[side]]
        write_text(tmp_path / "hr"[side], texts[side])
        assert (
            "case:mixed|eff:no|tok:13a" in score_json(capsys, *argv)["sacrebleu"]["signature"]
        )
        write_text(tmp_path / "hr"[side], lines)
    cased = write_text(tmp_path / "cased", texts[1])
    for references in (names[1], cased), (cased, names[1]):  # of two, one is cased
        words = [word for reference in references for word in ("--reference", reference)]
        of_two = score_json(capsys, "--hypothesis", names[0], *words, *argv[4:])
        assert "nrefs:2|case:mixed" in of_two["sacrebleu"]["signature"]


@pytest.mark.parametrize(
    "split",
    [
        lambda line: line.replace("bekannter", "bekann@@ ter").replace("gut", "g@@ ut"),
        lambda line: " ".join("\u2581" + word[:2] + " " + word[2:] for word in line.split()),
    ],
    ids=["subword_nmt", "sentencepiece"],
)
def test_left_over_subwords_are_joined(tmp_path, capsys, split):
    whole = score_json(capsys, write_log(tmp_path / "whole"))
    pieces = score_json(
        capsys,
        write_log(
            tmp_path / "pieces", [split(t) for t in TARGETS], [split(o) for o in OUTPUTS]
        ),
    )
    for key in ("multi_bleu", "compound_split_bleu", "sacrebleu"):
        assert pieces[key] == whole[key]


def test_join_subwords():
    assert join_subwords("a@@ b c@@", "subword_nmt") == "ab c"
    assert join_subwords("\u2581a b \u2581c", "sentencepiece") == "ab c"
    assert join_subwords("a@@ b", "none") == "a@@ b"
    for line in ("", " a@@ b@@  @@c @@", "\u2581a <0xE3> <0x81> <0x82> b \u2581", "<0xE3>x"):
        for kind in ("subword_nmt", "sentencepiece", "none"):
            assert join_subwords(line, kind) == data_utils.post_process(line, kind)


def test_log_decoded_by_fairseq_uses_its_running_text(tmp_path, capsys):
    """With fairseq's --tokenizer, T and D are running text; H is not comparable with T."""
    scores = score_json(
        capsys, write_log(tmp_path / "log", RAW_TARGETS, OUTPUTS, decoded=RAW_OUTPUTS)
    )
    assert scores["meta"]["hypothesis_lines"] == "D"
    expected = sacrebleu.corpus_bleu(RAW_OUTPUTS, [RAW_TARGETS])
    assert scores["sacrebleu"]["score"] == pytest.approx(expected.score)


def test_text_files_equal_the_log(tmp_path, capsys):
    hypothesis = write_text(tmp_path / "h", OUTPUTS)
    reference = write_text(tmp_path / "r", TARGETS)
    texts = score_json(capsys, "--hypothesis", hypothesis, "--reference", reference)
    log = score_json(capsys, write_log(tmp_path / "log"))
    assert {k: v for k, v in texts.items() if k != "meta"} == {
        k: v for k, v in log.items() if k != "meta"
    }


def test_chains_on_request(tmp_path, capsys):
    hypothesis = write_text(tmp_path / "h", RAW_OUTPUTS)
    reference = write_text(tmp_path / "r", TARGETS)
    argv = f"--hypothesis {hypothesis} --reference {reference}".split()
    scores = score_json(capsys, *argv, "--chain", "get-ende-bleu", "--chain", "moa-release")
    assert set(scores) == {"get_ende_bleu", "moa_release_bleu", "meta"}
    assert main(["score", *argv, "--chain", "get-ende-bleu"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert (
        len(printed) == 1
        and printed[0].startswith("get-ende-bleu")
        and "get_ende_bleu.sh" in printed[0]
    )


def test_raw_reference_serves_sacrebleu_only(tmp_path, capsys):
    raw = write_text(tmp_path / "raw", ["etwas ganz anderes", "noch etwas anderes"])
    plain = score_json(capsys, write_log(tmp_path / "log"))
    other = score_json(capsys, str(tmp_path / "log"), "--raw-reference", raw)
    assert other["multi_bleu"] == plain["multi_bleu"]
    assert other["sacrebleu"]["score"] < plain["sacrebleu"]["score"]


def test_of_a_raw_reference_those_lines_count_that_the_log_has(tmp_path, capsys):
    """Sentences are told by their numbers: the log lacks 0 and 2 to 5."""
    path = tmp_path / "log"
    write_log(path)
    path.write_text(path.read_text(encoding="utf-8").replace("-0\t", "-6\t"), encoding="utf-8")
    lines = ["nichts", RAW_OUTPUTS[1], *["nichts"] * 4, RAW_OUTPUTS[0]]
    raw = write_text(tmp_path / "raw", lines)
    scores = score_json(capsys, str(path), "--raw-reference", raw, "--allow-partial")
    assert scores["sacrebleu"]["score"] == pytest.approx(100)


def test_several_references(tmp_path, capsys):
    hypothesis = write_text(tmp_path / "h", OUTPUTS)
    files = [write_text(tmp_path / "r1", TARGETS), write_text(tmp_path / "r2", OUTPUTS)]
    scores = score_json(
        capsys, "--hypothesis", hypothesis, "--reference", files[0], "--reference", files[1]
    )
    assert scores["multi_bleu"]["score"] == pytest.approx(100)
    assert "nrefs:2" in scores["sacrebleu"]["signature"]


def test_warnings_name_what_makes_a_score_doubtful(tmp_path, capsys):
    path = tmp_path / "log"
    write_log(path, ["<<unk>> a <<unk>>", "b"], ["a", "b"])
    path.write_text(path.read_text(encoding="utf-8").replace("-1\t", "-7\t"), encoding="utf-8")
    assert main(["score", str(path)]) == 2 and "--allow-partial" in capsys.readouterr().err
    assert main(f"score {path} --allow-partial".split()) == 0
    warnings = capsys.readouterr().err
    assert "2 reference words are unknown" in warnings
    assert "6 sentences of the test set are missing" in warnings


def test_partial_log(tmp_path, capsys):
    path = write_log(tmp_path / "log", end="")
    assert main(["score", path]) == 2
    assert "--allow-partial" in capsys.readouterr().err
    assert score_json(capsys, path, "--allow-partial")["meta"]["complete"] is False


def test_bad_input_ends_with_status_2(tmp_path, capsys):
    good = write_text(tmp_path / "good", TARGETS)
    short = write_text(tmp_path / "short", TARGETS[:1])
    empty = write_text(tmp_path / "empty", [])
    latin = tmp_path / "latin"
    latin.write_bytes("schön\nja\n".encode("latin-1"))
    for argv, message in [
        (f"--hypothesis {good} --reference {short}".split(), "has 2 lines"),
        (f"--hypothesis {empty} --reference {good}".split(), "is empty"),
        (f"--hypothesis {latin} --reference {good}".split(), "line 1: byte 0xf6"),
        (["--hypothesis", good], "--reference"),
        ([], "GENERATE_OUTPUT"),
        (f"{good} --hypothesis {good} --reference {good}".split(), "either"),
        ([good], "no translation"),
        ([write_log(tmp_path / "log"), "--raw-reference", short], "1 lines"),
    ]:
        assert main(["score", *argv]) == 2, argv
        assert message in capsys.readouterr().err


# --- languages without spaces between words

JAPANESE = ["今日は天気がいいです。", "私は学生です。", "東京に行きました。"]
JAPANESE_OUTPUT = ["今日は天気がいいです。", "私は先生です。", "東京に行った。"]


@pytest.mark.parametrize(
    ("lang", "tokenizer"),
    [
        *((lang, "13a") for lang in ("de", "fr", "en_US", "vi", "")),
        *((lang, "zh") for lang in ("zh", "zh_CN", "zh-Hans", "zho_Hans", "cmn")),
        *((lang, "char") for lang in ("th", "km", "my", "lo", "yue", "tha_Thai")),
    ],
)
def test_the_tokeniser_is_that_of_the_language(lang, tokenizer):
    assert chains.tokenizer_for(lang) == tokenizer
    assert chains.tokenizer_for(lang, "intl") == "intl"


@pytest.mark.parametrize("lang", ["ja", "jpn_Jpan"])
def test_a_tokeniser_without_its_package_is_refused(monkeypatch, lang):
    monkeypatch.setitem(sys.modules, "MeCab", None)
    chains.tokenizer_for.cache_clear()
    with pytest.raises(UserError, match=r"ja-mecab.*sacrebleu\[ja\].*--sacrebleu-tokenizer"):
        chains.tokenizer_for(lang)
    chains.tokenizer_for.cache_clear()


@pytest.mark.parametrize("lang", ["zh", "th"])
def test_text_without_spaces_is_scored_by_its_characters(tmp_path, capsys, lang):
    names = [
        write_text(tmp_path / side, text)
        for side, text in (("h", JAPANESE_OUTPUT), ("r", JAPANESE))
    ]
    argv = ["--hypothesis", names[0], "--reference", names[1], "--detokenized"]
    found = score_json(capsys, *argv, "--target-lang", lang)
    tokenizer = "zh" if lang == "zh" else "char"
    expected = sacrebleu.corpus_bleu(JAPANESE_OUTPUT, [JAPANESE], tokenize=tokenizer).score
    assert found["sacrebleu"]["score"] == pytest.approx(expected) and expected > 40
    assert (
        f"tok:{tokenizer}|" in found["sacrebleu"]["signature"]
        and found["meta"]["without_spaces"]
    )
    assert any("multi-bleu" in line and "spaces" in line for line in found["meta"]["warnings"])
    other = score_json(capsys, *argv, "--target-lang", lang, "--sacrebleu-tokenizer", "13a")
    assert other["sacrebleu"]["score"] < 1 and "tok:13a" in other["sacrebleu"]["signature"]
    assert main(["score", *argv, "--target-lang", lang, "--against", names[0], "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["metrics"]
    assert (
        rows[0]["first"] == pytest.approx(expected)
        and f"tok:{tokenizer}" in rows[0]["signature"]
    )


@pytest.mark.parametrize(
    ("lang", "line", "without"),
    [
        ("ja", "彼は学生です 。", True),
        ("zh_CN", "今天天气很好 ， 我们去公园吧 。", True),
        ("yue", "今日 天氣 好 好 ， 我哋 去 公園 啦 。", True),
        ("tha", "วันนี้อากาศดี เราไปสวนกัน ดีไหม", True),
        ("ko", "나는 오늘 학교에 갑니다 .", True),
        ("de", "Haus", False),
        ("tgt", "今日は天気がいいです。", True),
        ("tgt", "das ist gut", False),
        ("tgt", "das ist", False),
        (None, "今日は天気がいいです。", True),
        (None, "das ist gut", False),
    ],
)
def test_a_known_language_decides_whether_spaces_part_words(
    tmp_path, capsys, lang, line, without
):
    file = write_text(tmp_path / "text", [line])
    flags = ["--target-lang", lang] if lang else []
    argv = ["--hypothesis", file, "--reference", file, "--sacrebleu-tokenizer", "char", *flags]
    found = score_json(capsys, *argv)["meta"]
    assert found["without_spaces"] is without
    assert (
        any("multi-bleu" in warning and "words" in warning for warning in found["warnings"])
        == without
    )


def test_a_few_small_latin_letters_do_not_make_a_text_lower_cased(tmp_path, capsys):
    """`islower` looks at the letters that have cases alone: then the text was scored as tokens."""
    names = [
        write_text(tmp_path / side, ["重さは 5 kg です。", "長さは 3 cm です。"])
        for side in "hr"
    ]
    argv = ["--hypothesis", names[0], "--reference", names[1], "--target-lang", "zh"]
    assert {"case:mixed", "tok:zh"} < set(
        score_json(capsys, *argv)["sacrebleu"]["signature"].split("|")
    )


# --- run folders


def test_a_run_folder_names_its_log_and_its_language(tmp_path, capsys):
    log = write_log(tmp_path / "generate-test1.txt", RAW_TARGETS, RAW_OUTPUTS)
    write_log(tmp_path / "generate-test.txt")
    assert score_json(capsys, str(tmp_path))["meta"]["target_lang"] == "de"
    assert "German is assumed" in warnings_of(score_json(capsys, log))
    recipe = "data: {source: de, target: fr}\ngenerate: {subsets: [test1, test]}\n"
    (tmp_path / "recipe.yaml").write_text(recipe)
    for argv in ([str(tmp_path)], [log], f"--hypothesis {log} --reference {log}".split()):
        found = score_json(capsys, *argv)
        assert found["meta"]["target_lang"] == "fr" and found["meta"]["input"] == log
        assert "German" not in warnings_of(found)
    for argv in ([log], f"--hypothesis {log} --reference {log}".split()):
        assert score_json(capsys, *argv, "--target-lang", "en")["meta"]["target_lang"] == "en"
    assert main(f"score {tmp_path} --against {tmp_path} --json".split()) == 0
    assert json.loads(capsys.readouterr().out)["metrics"][0]["difference"] == 0
    for damaged in ("", "\0", "data: 3", "data: {target: 7}", "generate: {subsets: {}}"):
        (tmp_path / "recipe.yaml").write_text(damaged)
        for argv in ([log], [str(tmp_path)], f"--hypothesis {log} --reference {log}".split()):
            assert main(["score", *argv]) == 2, damaged
            assert str(tmp_path / "recipe.yaml") in capsys.readouterr().err
    (tmp_path / "recipe.yaml").unlink()  # the remedy
    assert score_json(capsys, log, "--target-lang", "en")["meta"]["target_lang"] == "en"
    (tmp_path / "empty").mkdir()
    assert (
        main(["score", str(tmp_path / "empty")]) == 2
        and "generate-SUBSET.txt" in capsys.readouterr().err
    )


def test_one_stray_lower_one_eighth_block_is_text():
    assert subword_kind(["a b c", "f g \u2581 i", "\u2581 x"]) == "none"
    assert subword_kind(["\u2581a b \u2581c", "\u2581d", "", " ", ""]) == "sentencepiece"
    assert subword_kind(["a@@ b c", "d"]) == "subword_nmt"


# --- what each side shows by itself: subwords, tokenisation, unknown words

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
TOKENS, OUTPUT = (
    [tokenize(line, "fr", True) for line in lines] for lines in (RUNNING, TRANSLATED)
)


def bpe(line):
    return " ".join(
        f"{word[:2]}@@ {word[2:]}" if len(word) > 4 else word for word in line.split()
    )


def pieces(line):
    return " ".join(f"\u2581{word[:2]} {word[2:]}".rstrip() for word in line.split())


def files_of(folder, hypotheses, references):
    texts = (("--hypothesis", hypotheses), ("--reference", references))
    return [
        word
        for flag, lines in texts
        for word in (flag, write_text(folder / flag.strip("-"), lines))
    ]


@pytest.fixture
def score(capsys):
    return lambda *argv: score_json(capsys, *argv, "--target-lang", "fr")


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
    for argv in (
        [write_log(tmp_path / "log", targets, outputs)],
        files_of(tmp_path, outputs, targets),
    ):
        scores = score(*argv, "--remove-bpe", "auto")
        assert numbers(scores) == numbers(whole)
        assert scores["meta"]["subwords_joined"] == {
            "hypotheses": kinds[0],
            "references": kinds[1],
        }
        assert "subword" not in warnings_of(scores)


@pytest.mark.parametrize("split", [bpe, pieces])
def test_subwords_that_are_left_are_said(tmp_path, score, split):
    argv = files_of(tmp_path, OUTPUT, [*map(split, TOKENS)])
    doubt = warnings_of(score(*argv))
    assert "references still hold subwords" in doubt and "--remove-bpe auto" in doubt
    assert "subwords" not in warnings_of(score(*argv, "--remove-bpe", "auto"))
    assert "subwords" not in warnings_of(
        score(*files_of(tmp_path, ["a @@ b", "@-@ c"], ["a @@ b", "c"]))
    )


def test_multi_bleu_of_running_text_is_doubted(tmp_path, score):
    both = warnings_of(score(*files_of(tmp_path, TRANSLATED, RUNNING)))
    assert (
        "multi-bleu, compound-split: the hypotheses look untokenised" in both
        and "references look" in both
    )
    one = warnings_of(score(*files_of(tmp_path, OUTPUT, RUNNING), "--chain", "moa-release"))
    assert "moa-release: the references look untokenised" in one
    for argv in (files_of(tmp_path, OUTPUT, TOKENS), files_of(tmp_path, ["a b"], ["a c"])):
        assert "tokenised" not in warnings_of(score(*argv))
    running = files_of(tmp_path, TRANSLATED, RUNNING)
    assert "tokenised" not in warnings_of(
        score(*running, "--chain", "sacrebleu", "--detokenized")
    )


def test_sacrebleu_of_tokens_taken_for_running_text_is_doubted(tmp_path, score):
    tokens = files_of(tmp_path, OUTPUT, TOKENS)
    doubt = warnings_of(score(*tokens, "--detokenized"))
    for side in ("hypotheses", "references"):
        assert f"sacrebleu: the {side} look tokenised" in doubt


def test_get_ende_bleu_wants_running_hypotheses_and_tokenised_references(tmp_path, score):
    chain = ("--chain", "get-ende-bleu")
    assert "tokenised" not in warnings_of(
        score(*files_of(tmp_path, TRANSLATED, TOKENS), *chain)
    )
    doubt = warnings_of(score(*files_of(tmp_path, OUTPUT, RUNNING), *chain))
    for words in (
        "hypotheses look tokenised already, which makes the score wrong: detokenise them",
        "references look untokenised, which makes the score wrong: tokenise them",
    ):
        assert f"get-ende-bleu: the {words}" in doubt


def test_an_unknown_word_is_one_word_for_sacrebleu(tmp_path, score):
    """Training text is normalised, so « » and – of a test set are unknown; 13a made five words of each."""
    assert not set("«»–") & {
        sign for line in RUNNING for sign in normalize_punctuation(line, "fr")
    }
    targets = [
        " ".join("<<unk>>" if set(word) & set("«»–") else word for word in line.split())
        for line in TOKENS
    ]
    assert sum(line.count("<<unk>>") for line in targets) == 8
    scores = score(write_log(tmp_path / "log", targets, OUTPUT))
    exact = score(*files_of(tmp_path, OUTPUT, TOKENS))
    for chain in ("sacrebleu", "multi_bleu"):
        assert {**scores[chain], "chain": 0} == {**exact[chain], "chain": 0}
    # what the model does not know either is not a match, and one word, too
    outputs = [line.replace("<<unk>>", "<unk>") for line in targets]
    assert (
        score(write_log(tmp_path / "log", targets, outputs))["sacrebleu"]["hyp_len"]
        == exact["sacrebleu"]["ref_len"]
    )
    assert score(write_log(tmp_path / "log", targets, outputs))["sacrebleu"]["score"] < 100


def test_french_text_survives_the_detokenizer():
    for line in RUNNING[:1] + TRANSLATED:
        assert detokenize(tokenize(line, "fr", True), "fr").replace(" ?", "?") == line.replace(
            " ?", "?"
        )
    assert join_subwords(bpe(TOKENS[0]), "subword_nmt") == TOKENS[0]


def test_what_help_says_of_text_with_split_hyphens(tmp_path, score, capsys):
    """`tokenizer.perl -a` splits hyphens once, as compound splitting does; the release splits them again."""
    lines = [
        "der E-Mail-Server ist wohl-bekannt .",
        "ein Preis-Leistungs-Test , sagt er .",
        "gut .",
    ]
    other = [
        "der Mail-Server ist wohl-bekannt .",
        "ein Preis-Leistung-Test , sagte er .",
        "gut .",
    ]
    split = [
        [tokenize(line, "de", aggressive_hyphens=True) for line in side]
        for side in (other, lines)
    ]
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
