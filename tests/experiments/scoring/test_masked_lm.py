"""Perplexities of a masked LM: fairseq's own number, its maskings, and the arithmetic of words."""

import json
import math
import re

import pytest
import torch

import moa_fairseq
from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.data.manifest import read_manifest
from moa_fairseq.experiments.scoring.masked_lm import LINE_END, TEXT, Masking, measure
from moa_fairseq.experiments.scoring.trained_model import batches, load_trained

CPU = torch.device("cpu")


def scores(capsys, checkpoint, *args):
    assert (
        main(["score", "--masked-lm", str(checkpoint), "--json", "--cpu", *map(str, args)]) == 0
    )
    return json.loads(capsys.readouterr().out)


@pytest.mark.thorough
@pytest.mark.slow
def test_one_masking_is_what_fairseqs_validation_prints(
    toy_masked_lm, toy_wiki_data, fairseq, capsys
):
    done = fairseq(
        *(
            "validate",
            toy_wiki_data,
            "--user-dir",
            str(moa_fairseq.__path__[0]),
            "--task",
            "masked_lm",
        ),
        *f"--path {toy_masked_lm} --valid-subset test --max-tokens 240 --cpu".split(),
    )
    printed = float(re.search(r"ppl (\S+)", done.stdout + done.stderr).group(1))
    # trained with --seed 7: validation masks by that seed
    ours = scores(capsys, toy_masked_lm, "--mask-seed", 7, "--maskings", 1)["masked_lm_ppl"]
    assert (
        ours["score"] == pytest.approx(printed, rel=0.002) and ours["sd"] is None
    )  # its loss has three digits


def test_several_maskings_are_averaged_and_repeatable(toy_masked_lm, toy_wiki_data, capsys):
    first = scores(capsys, toy_masked_lm, "--maskings", 3)
    values = first["masked_lm_ppl"]["values"]
    assert len(set(values)) == 3
    assert first["masked_lm_ppl"]["score"] == pytest.approx(sum(values) / 3)
    assert first["masked_lm_ppl"]["sd"] == pytest.approx(
        torch.tensor(values).std().item(), rel=1e-4
    )
    shifted = scores(
        capsys, toy_masked_lm, "--maskings", 2, "--mask-seed", 2, "--max-tokens", 60
    )
    assert shifted["masked_lm_ppl"]["values"] == pytest.approx(
        values[1:]
    )  # whatever the batches
    words = read_manifest(toy_wiki_data)["splits"]["test"]
    tokens = first["meta"]["tokens"]
    assert (tokens["text"], tokens["line_end"]) == (words["subwords"], words["lines"])
    assert first["meta"]["text"]["hyphen"] > 0 and first["meta"]["text"]["unk"] > 0


def test_each_kind_of_token_is_counted_for_itself(toy_masked_lm, toy_wiki_data):
    model, task = load_trained(toy_masked_lm, toy_wiki_data)
    result = measure(model.eval(), task, "test", 1, 240, CPU)
    assert all(0 < result.masked[kind] < result.tokens[kind] for kind in (TEXT, LINE_END))
    share = sum(result.masked.values()) / sum(result.tokens.values())
    assert share == pytest.approx(task.cfg.mask_prob, abs=0.03)


def test_a_batch_in_which_nothing_is_masked_counts(toy_masked_lm, toy_wiki_data):
    model, task = load_trained(toy_masked_lm, toy_wiki_data)
    task.cfg.mask_prob = 0.02
    size = task.cfg.tokens_per_sample
    task.cfg.seed = 1
    assert not all(
        sample["target"].ne(1).any()
        for sample in batches(task, model.eval(), "test", size, CPU)
    )
    words = read_manifest(toy_wiki_data)["splits"]["test"]
    tokens = measure(model, task, "test", 1, size, CPU).tokens
    assert (tokens[TEXT], tokens[LINE_END]) == (words["subwords"], words["lines"])


def test_no_sample_is_left_out_because_it_is_long(toy_masked_lm, toy_wiki_data):
    model, task = load_trained(toy_masked_lm, toy_wiki_data)
    positions = task.cfg.tokens_per_sample
    task.cfg.tokens_per_sample = 100_000
    with pytest.raises(
        UserError, match=r"1 of 1 samples are longer .*--sample-break-mode none"
    ):
        measure(model.eval(), task, "test", 1, 240, CPU)
    task.cfg.tokens_per_sample = positions
    task.cfg.sample_break_mode = "none"
    words = read_manifest(toy_wiki_data)["splits"]["test"]
    assert measure(model, task, "test", 1, 240, CPU).tokens[TEXT] == words["subwords"]


def test_the_word_level_number_shares_subwords_out():
    tokens = {"start": 10, "line_end": 4, "text": 100}
    result = Masking(
        tokens,
        {"start": 2, "line_end": 1, "text": 15},
        {"start": 0.1, "line_end": 0.5, "text": 30.0},
    )
    assert result.perplexity() == pytest.approx(math.exp(30.6 / 18))
    assert result.text_perplexity() == pytest.approx(math.exp(2))
    assert result.word_perplexity(words=50, lines=4) == pytest.approx(
        math.exp((2 * 100 + 0.5 * 4) / 54)
    )


def test_text_report_and_missing_manifest(toy_masked_lm, toy_wiki_data, tmp_path, capsys):
    for path in toy_wiki_data.iterdir():
        if path.name != "manifest.json":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    command = f"score --masked-lm {toy_masked_lm} --data {tmp_path} --maskings 2 --cpu".split()
    assert main(command) == 0
    said = capsys.readouterr()
    assert (
        re.search(r"masked_lm_ppl +\d+\.\d+ ± \d", said.out)
        and "masked_lm_word_ppl" not in said.out
    )
    assert "no word-level perplexity" in said.err


def test_words_of_a_language_without_spaces_are_not_counted(
    toy_masked_lm, toy_wiki_data, tmp_path, capsys
):
    for path in toy_wiki_data.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    facts = manifest["splits"]["test"]
    assert 0 < facts["filled"] < facts["lines"] and facts["words"] > 2 * facts["filled"]
    facts["words"] = facts["filled"]
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    found = scores(capsys, toy_masked_lm, "--maskings", 1, "--data", tmp_path)
    assert "masked_lm_word_ppl" not in found and "masked_lm_ppl" in found
    assert any("no word-level perplexity" in warning for warning in found["meta"]["warnings"])
    found = scores(
        capsys, toy_masked_lm, "--maskings", 1, "--data", tmp_path, "--target-lang", "de"
    )
    assert "masked_lm_word_ppl" in found, "a known language decides"
    found = scores(
        capsys, toy_masked_lm, "--maskings", 1, "--data", toy_wiki_data, "--target-lang", "th"
    )
    assert "masked_lm_word_ppl" not in found
    (tmp_path / "manifest.json").write_text(
        json.dumps({**manifest, "splits": {"test": {"words": "many"}}})
    )
    assert main(f"score --masked-lm {toy_masked_lm} --data {tmp_path} --cpu".split()) == 2
    assert "lacks lines" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--subset", "test9"], "--subset test9"),
        (["--maskings", "0"], "--maskings must be at least 1"),
        (["--data", "nowhere"], "--data nowhere is not a folder"),
        (["generate-test.txt"], "leave out GENERATE_OUTPUT"),
    ],
)
def test_bad_input(toy_masked_lm, capsys, flags, says):
    assert main(["score", "--masked-lm", str(toy_masked_lm), "--cpu", *flags]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(("name", "size"), [("test.bin", 0), ("test.idx", 40)])
def test_damaged_data_is_named(toy_masked_lm, toy_wiki_data, tmp_path, capsys, name, size):
    for path in toy_wiki_data.iterdir():
        (tmp_path / path.name).write_bytes(
            path.read_bytes()[: size if path.name == name else None]
        )
    assert main(f"score --masked-lm {toy_masked_lm} --data {tmp_path} --cpu".split()) == 2
    assert "--subset test" in capsys.readouterr().err


def test_a_translation_model_is_refused(toy_checkpoint, toy_data, capsys):
    assert main(f"score --masked-lm {toy_checkpoint} --data {toy_data}".split()) == 2
    assert "is not a masked language model" in capsys.readouterr().err
