"""Whatever is longer than the model is found before the training, and no score is one of a part."""

import argparse

import numpy
import pytest

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.unknown import Symbols
from moa_fairseq.experiments.recipes import lengths, scores
from moa_fairseq.experiments.recipes.flags import check_flags
from moa_fairseq.experiments.recipes.lengths import check_sentences
from moa_fairseq.experiments.recipes.loading import load_recipe
from moa_fairseq.experiments.recipes.scores import read_report, scores_in

REPORT = "Evaluated {} tokens in 12.5s\nLoss (base 2): 4.2258, Perplexity: 18.71\n"


@pytest.fixture
def causal(small, write_config):
    """causal(*overrides) → the recipe of a language model that reads 24 tokens."""
    flags = {"tokens-per-sample": 24, "optimizer": "adam", "lr": 0.01}
    train = {
        "task": "language_modeling",
        "criterion": "cross_entropy",
        "max_tokens": 240,
        "max_epoch": 2,
    }
    model = {"arch": "transformer_lm", "flags": {"decoder-layers": 1, "decoder-embed-dim": 16}}
    mapping = {
        **{key: small[key] for key in ("experiment", "summary")},
        "data": {"recipe": "binarised"},
        "model": model,
        "train": {**train, "flags": flags},
        "score": {"headline": "lm_ppl", "subsets": ["test"]},
    }
    path = write_config(mapping)
    return lambda *overrides: load_recipe(path, overrides)


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["score.flags.tokens-per-sample=25"], "score.flags.tokens-per-sample=24"),
        (["score.flags.context-window=24"], "score.flags.context-window"),
        (["score.flags.context-window=2000"], "score.flags.context-window"),
        (
            ["train.task=language_modeling_truncated_bptt", "score.flags.context-window=4"],
            "context-window",
        ),
        (["score.flags.post-process=sentencepiece"], "score.flags.post-process='@@ '"),
        (["score.flags.remove-bpe=true"], "score.flags.post-process='@@ '"),
        (["score.flags.post-process='@@ '"], None),
        ([], None),
        (["score.flags.tokens-per-sample=24", "score.flags.context-window=23"], None),
        (["score.flags.tokens-per-sample=25", "model.flags.max-target-positions=25"], None),
        (
            ["train.task=language_modeling_truncated_bptt", "score.flags.tokens-per-sample=48"],
            None,
        ),
    ],
)
def test_blocks_of_a_language_model(causal, overrides, key):
    if key is None:
        check_flags(causal(*overrides))
        return
    with pytest.raises(UserError, match=key):
        check_flags(causal(*overrides))


def test_the_blocks_of_a_perplexity_are_those_that_were_read(causal, tmp_path):
    """fairseq-eval-lm takes the model's length in place of its default."""
    own = "INFO:x:--tokens-per-sample 24: the model's own\n"
    report = REPORT.format(15)
    recipe = causal("score.flags.tokens-per-sample=1024", "score.flags.post-process='@@ '")
    check_flags(recipe)
    evaluation = read_report(own + report, tmp_path / "x", recipe)["meta"]["evaluation"]
    assert evaluation == {"tokens_per_sample": 24, "post_process": "@@ ", "tokens": 15}
    assert (
        "tokens_per_sample"
        not in read_report(report, tmp_path / "x", causal())["meta"]["evaluation"]
    )


def test_a_perplexity_of_fewer_tokens_is_no_result(causal, tmp_path):
    with pytest.raises(
        UserError, match=r"15 of 4,239 tokens.*score\.flags\.tokens-per-sample=24"
    ):
        read_report(REPORT.format(15), tmp_path / "eval-lm-test.txt", causal(), 4239)
    scores = read_report(REPORT.format("4,239"), tmp_path / "eval-lm-test.txt", causal(), 4239)
    assert scores["lm_ppl"]["score"] == 18.71 and scores["meta"]["evaluation"]["tokens"] == 4239


@pytest.mark.parametrize("mode, whole", [("none", 15), ("complete_doc", 14)])
def test_an_empty_line_is_a_token_unless_it_parts_documents(
    causal, tmp_path, monkeypatch, mode, whole
):
    """A line that is empty has its end alone; with complete_doc fairseq reads it as the end of a document."""
    sizes = numpy.array([5, 1, 9])
    monkeypatch.setattr(scores, "sentence_sizes", lambda *_: (sizes, sizes))
    monkeypatch.setattr(scores, "count_symbols", lambda *_: {"test": Symbols(12, 3, 8)})
    recipe = causal(f"score.flags.sample-break-mode={mode}")
    path = tmp_path / "eval-lm-test.txt"
    path.write_text(REPORT.format(whole))
    evaluation = scores_in(path, recipe, tmp_path, "test")["meta"]["evaluation"]
    assert (evaluation["tokens"], evaluation["unknown"]) == (whole, 0.25)
    path.write_text(REPORT.format(whole - 1))
    with pytest.raises(UserError, match=f"{whole - 1} of {whole} tokens"):
        scores_in(path, recipe, tmp_path, "test")


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("split", ["valid", "test"])
def test_a_sentence_that_is_longer_than_the_model(
    small, write_config, make_lines, tmp_path, side, split
):
    """make_lines' sentences have two tokens."""
    small["data"]["recipe"] = "binarised"
    path = write_config(small)
    key = f"model.flags.max-{side}-positions"
    data = make_lines(tmp_path / "bin", {"train": 3, "valid": 3, "test": 3}, "en-de")
    overrides = [f"{key}=1"]
    if split == "test":
        # Not of what is scored
        overrides.append("train.flags.skip-invalid-size-inputs-valid-test=true")
    recipe = load_recipe(path, overrides)
    with pytest.raises(
        UserError, match=rf"sentence 1 of (valid|test) has 2 tokens.*{key}=2"
    ) as refusal:
        check_sentences(recipe, check_flags(recipe), data)
    assert split == "valid" or "of test" in str(refusal.value)
    recipe = load_recipe(path, [f"{key}=2"])
    check_sentences(recipe, check_flags(recipe), data)
    rest = (
        "generate.flags.skip-invalid-size-inputs-valid-test=true"  # for a model that is trained
    )
    assert (rest in str(refusal.value)) == ("of test has" in str(refusal.value))
    if split == "test":
        recipe = load_recipe(path, [*overrides, rest])
        check_sentences(recipe, check_flags(recipe), data)


def test_a_trained_masked_language_models_lines_can_still_be_cut(causal, tmp_path, monkeypatch):
    """Its score cuts text as its training did, unless score.flags says otherwise."""
    recipe = causal(
        "train.task=masked_lm",
        "train.flags.sample-break-mode=eos",
        "score.headline=masked_lm_ppl",
    )
    recipe.train.flags["skip-invalid-size-inputs-valid-test"] = True  # of what is not scored
    monkeypatch.setattr(lengths, "sentence_sizes", lambda *_: [numpy.array([30])])
    training = argparse.Namespace(tokens_per_sample=24)
    with pytest.raises(
        UserError, match=r"of test has 31 tokens.*score\.flags\.sample-break-mode=none"
    ):
        check_sentences(recipe, training, tmp_path)
    recipe.score.flags["sample-break-mode"] = "none"
    check_sentences(recipe, training, tmp_path)


@pytest.mark.parametrize(
    "overrides", [[], ["shorten-method=truncate", "shorten-data-split-list=train"]]
)
def test_a_sentence_that_is_longer_than_the_classifier(
    shipped, tmp_path, monkeypatch, overrides
):
    """Found before the training, with the flag that lets it be read: <s> is a token, too."""

    def check(*further):
        recipe = shipped(
            "listops_transformer_8h",
            *(f"train.flags.{each}" for each in (*overrides, *further)),
        )
        check_sentences(recipe, check_flags(recipe), tmp_path)

    monkeypatch.setattr(lengths, "sentence_sizes", lambda *_: [numpy.array([5, 64])] * 2)
    with pytest.raises(
        UserError, match=r"sentence 2 of test has 65 tokens.*train\.flags\.max-positions=65 "
    ):
        check()
    check("max-positions=65")
    check("shorten-method=truncate", "shorten-data-split-list=null")  # everywhere


def test_a_flag_has_one_value(shipped):
    """train.flags would be taken in silence, whatever a recipe over it says in model.flags."""
    for value in (40, "null"):
        with pytest.raises(
            UserError, match=r"model\.flags\.max-positions.*train\.flags\.max-positions"
        ):
            shipped("listops_transformer_8h", f"model.flags.max-positions={value}")
    shipped("listops_transformer_8h", "model.flags.max-positions=64")


@pytest.mark.parametrize(
    "flag",
    [
        *("generate.flags.max-source-positions=9", "generate.flags.num-shards=2"),
        "score.flags.skip-invalid-size-inputs-valid-test=true",
    ],
)
def test_flags_that_make_a_score_one_of_a_part(small, write_config, flag):
    with pytest.raises(UserError, match=flag.partition("=")[0]):
        load_recipe(write_config(small), [flag])
