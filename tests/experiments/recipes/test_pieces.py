"""A recipe with SentencePiece, from raw Japanese to a score that is sacreBLEU's own."""

import json
import random
import re
import subprocess
import sys

import pytest

from moa_fairseq.cli import main
from moa_fairseq.errors import UserError
from moa_fairseq.experiments.recipes.headline import headline_of
from moa_fairseq.experiments.recipes.loading import load_recipe

pytestmark = pytest.mark.usefixtures("forked_commands")

WORDS = {
    "猫": "cat",
    "犬": "dog",
    "水": "water",
    "本": "book",
    "見る": "sees",
    "待つ": "waits",
    "東京": "Tokyo",
}


@pytest.fixture
def pairs(tmp_path):
    """Raw English and Japanese; one Japanese letter of the test text is in no other."""
    folder = tmp_path / "pairs"
    chance = random.Random(2)
    folder.mkdir()
    for split, size in (("train", 80), ("valid", 8), ("test", 8)):
        chosen = [chance.choices([*WORDS.items()], k=chance.randint(2, 5)) for _ in range(size)]
        japanese = ["、".join(ja for ja, _ in words) + "。" for words in chosen]
        if split == "test":
            japanese[0] = "鬱" + japanese[0]
        english = [" ".join(en for _, en in words) + "." for words in chosen]
        for language, lines in (("ja", japanese), ("en", english)):
            (folder / f"{split}.{language}").write_text(
                "".join(f"{line}\n" for line in lines), "utf-8"
            )
    return folder


@pytest.fixture
def recipe(small, write_config):
    small["data"] = {"recipe": "parallel", "source": "en", "target": "ja", "bpe": 320}
    small["data"]["segmentation"] = "sentencepiece"
    small["train"]["flags"] |= {
        "eval-bleu": True,
        "eval-bleu-args": '{"beam": 1, "max_len_b": 4}',
    }
    small["train"]["flags"]["eval-bleu-print-samples"] = True
    small["score"]["flags"] = {"sacrebleu-tokenizer": "char"}
    small["generate"]["flags"] = {"max-len-b": 20}
    return small


@pytest.mark.thorough
def test_a_score_is_that_of_sacrebleus_command_on_the_raw_text(
    recipe, write_config, pairs, capsys
):
    run = pairs.parent / "run"
    line = ["recipe", write_config(recipe), "--data", pairs, "--save-dir", run, "--gpus", "0"]
    line += ["--set", "train.max_epoch=6"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(pairs.parent)
        assert main([*map(str, line)]) == 0
    found = json.loads((run / "score-test.json").read_text("utf-8"))
    assert json.loads((run / "result.json").read_text("utf-8"))["headline"] == "sacrebleu"
    output = run / "out.ja"
    assert main(f"translate {run} {pairs}/test.en --output {output} --cpu".split()) == 0
    sacrebleu = [
        sys.executable,
        "-m",
        "sacrebleu",
        str(pairs / "test.ja"),
        "-i",
        str(output),
        "-tok",
        "char",
    ]
    told = json.loads(
        subprocess.run([*sacrebleu, "-w", "9"], capture_output=True, check=True).stdout
    )
    assert (found["sacrebleu"]["signature"], round(found["sacrebleu"]["score"], 9)) == (
        told["signature"],
        told["score"],
    )
    assert not found["meta"]["warnings"] and set(found) == {"sacrebleu", "meta"}
    log = (run / "train.log").read_text("utf-8")
    references = re.findall(r"example reference: (.*)", log)
    raw = (pairs / "valid.ja").read_text("utf-8").splitlines()
    assert references and set(references) <= set(raw), "validation decodes its pieces"
    capsys.readouterr()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"segmentation": "words"}, "data.segmentation"),
        ({"bpe": None}, "data.bpe"),
        ({"segmentation": "subword_nmt", "piece_model": "bpe"}, "data.piece_model"),
        ({"segmentation": "subword_nmt", "byte_fallback": False}, "data.byte_fallback"),
        ({"recipe": "multi30k", "target": "de"}, "data.segmentation"),
        ({"bpe": None, "codes": "some.model", "joined_dictionary": False}, "data.codes"),
    ],
)
def test_what_is_refused(recipe, write_config, change, named):
    recipe["data"] |= change
    recipe["model"]["share_all_embeddings"] = False
    with pytest.raises(UserError, match=named):
        load_recipe(write_config(recipe))


def test_moses_tokens_in_pieces_are_scored_as_tokens(recipe, write_config, shown):
    for tokenize, raw in ((None, True), (False, True), (True, False)):
        recipe["data"]["tokenize"] = tokenize
        generate, score = shown(load_recipe(write_config(recipe)))[-2:]
        assert generate[generate.index("--remove-bpe") + 1] == "sentencepiece"
        assert ("--detokenized" in score, "--chain" in score) == (raw, raw)
        assert score[score.index("--remove-bpe") + 1] == "none", "@@ of a raw text is text"


def test_running_text_of_any_language_is_scored_by_sacrebleu(recipe, write_config):
    recipe["data"]["target"] = "fi"
    assert recipe["score"]["headline"] == "multi_bleu"
    loaded = load_recipe(write_config(recipe))
    assert headline_of(loaded, loaded, {}) == "sacrebleu"
    tokens = load_recipe(write_config(recipe), ["data.tokenize=true"])
    assert headline_of(tokens, tokens, {}) == "multi_bleu"
