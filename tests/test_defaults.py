"""docs/defaults.md and harmless_options.yaml name every option of the libraries, and what the code sets."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest
import sentencepiece
import yaml
from fairseq import options
from fairseq.dataclass.configs import CommonConfig, DatasetConfig, EvalLMConfig
from fairseq.tasks.language_modeling import LanguageModelingConfig
from fairseq.tasks.masked_lm import MaskedLMConfig
from fairseq.tasks.translation import TranslationConfig
from sacrebleu.metrics import BLEU, CHRF
from sacremoses import MosesDetokenizer
from sentencepiece import sentencepiece_model_pb2
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import get_vocabulary, learn_bpe

from moa_fairseq.experiments.data import monolingual, pieces, text_stages
from moa_fairseq.experiments.data.catalogue import datasets
from moa_fairseq.experiments.data.prepare import Preparation
from moa_fairseq.experiments.inference import zero_shot
from moa_fairseq.experiments.scoring import against, chains
from moa_fairseq.text import tokenizer

PAGE = Path(__file__).resolve().parents[1] / "docs" / "defaults.md"
HARMLESS = Path(__file__).with_name("harmless_options.yaml")
SET = "Set"
# Names of SentencePiece's trainer for fields of its file, and what only says where text comes from and goes.
FIELDS = {"normalization_rule_name": "name"}
PLACES = {"sentence_iterator", "model_writer", "minloglevel"}


def table():
    """Library → option → what we do."""
    actions = {}
    for row in yaml.safe_load(HARMLESS.read_text("utf-8")):
        actions.setdefault(row["library"], {}).update(
            dict.fromkeys(row["options"], row["action"])
        )
    for line in PAGE.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) == 4 and cells[0] not in ("Library", "---"):
            for name in re.findall(r"`([^`]+)`", cells[1]):
                actions.setdefault(cells[0], {})[name] = cells[3]
    return actions


def parameters(*functions):
    names = {name for function in functions for name in inspect.signature(function).parameters}
    return names - {"self"}


def keywords(module, *functions):
    """The names of arguments that a module's calls of these functions have; of a dict literal its keys."""
    found = set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in functions:
            found |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return found


def fields(*configs):
    common = {field.name for field in dataclasses.fields(CommonConfig)}
    names = {field.name for config in configs for field in dataclasses.fields(config)}
    return names - common - {"_name"} | {"seed"}


def preprocess_options():
    groups = options.get_preprocessing_parser()._action_groups
    (actions,) = (group._group_actions for group in groups if group.title == "Preprocessing")
    return {action.option_strings[0]: {*action.option_strings} for action in actions}


HAS = {
    "SentencePiece": {
        field.name
        for spec in (
            sentencepiece_model_pb2.TrainerSpec,
            sentencepiece_model_pb2.NormalizerSpec,
        )
        for field in spec.DESCRIPTOR.fields
    },
    "SentencePiece, encoding": parameters(sentencepiece.SentencePieceProcessor.Encode),
    "subword-nmt": parameters(learn_bpe, get_vocabulary, BPE.__init__, BPE.process_line),
    "fairseq-preprocess": {*preprocess_options()},
    "fairseq": fields(
        DatasetConfig, EvalLMConfig, LanguageModelingConfig, MaskedLMConfig, TranslationConfig
    ),
    "sacreBLEU": parameters(BLEU.__init__, CHRF.__init__),
    "Moses (sacremoses)": parameters(MosesDetokenizer.__init__, MosesDetokenizer.detokenize),
}


def test_every_option_of_a_library_has_a_line():
    for library, names in HAS.items():
        known = set(table()[library])
        said = known - {"<unk>", "<s>", "</s>", "<pad>", "normalization_rule_name"}
        assert names == said, (
            f"{library}: without a line {names - said}; no longer there {said - names}"
        )


def of_sentencepiece():
    settings = [
        pieces.RELEASED,
        pieces.LANGUAGE_MODEL,
        pieces.translation_settings("bpe", False),
    ]
    names = {name for some in settings for name in some} | keywords(pieces, "train")
    return {FIELDS.get(name, name) for name in names - PLACES}


def of_preprocess(tmp_path):
    pair = {
        "source": "en",
        "target": "de",
        "joined_dictionary": False,
        "lowercase": False,
        "bpe": 9,
    }
    pair.update(segmentation="sentencepiece", piece_model="bpe", byte_fallback=True)
    settings = {
        "parallel": pair,
        "wmt14_en_de_vaswani": {
            **pair,
            "segmentation": "subword_nmt",
            "joined_dictionary": True,
        },
    }
    said = set()
    for name in (
        "parallel",
        "wmt14_en_de_vaswani",
        "text_sp",
        "text_gpt2bpe",
        "listops",
        "enwik8",
    ):
        values = {"recipe": name, "bpe": None, "flags": {}, **settings.get(name, {})}
        job = Preparation(
            values, datasets()[name].subsets, tmp_path / "none", tmp_path, unread=True
        )
        for step in job.steps():
            said |= {word for word in step.command if word.startswith("--")}
    aliases = {
        alias: name for name, aliases in preprocess_options().items() for alias in aliases
    }
    return {aliases[word] for word in said}


def test_what_the_code_sets_is_said_to_be_set_and_nothing_else(tmp_path):
    code = {
        "SentencePiece": of_sentencepiece(),
        "SentencePiece, encoding": keywords(monolingual, "encode"),
        "subword-nmt": keywords(
            text_stages, "learn_bpe", "get_vocabulary", "BPE", "process_line"
        ),
        "fairseq-preprocess": of_preprocess(tmp_path),
        "sacreBLEU": keywords(chains, "BLEU") | keywords(against, "CHRF") | {"lowercase"},
        "lm_eval": keywords(zero_shot, "simple_evaluate"),
    }
    for library, names in code.items():
        rows = table()[library]
        unsaid = {name for name in names if not rows.get(name, "").startswith(SET)}
        assert not unsaid, f"{library}: docs/defaults.md does not say that {unsaid} are set"
    assert "MosesDetokenizer" in inspect.getsource(tokenizer)
    for library in ("SentencePiece", "fairseq-preprocess"):
        said = {name for name, what in table()[library].items() if what.startswith(SET)}
        assert said - {"normalization_rule_name"} <= code[library], library


@pytest.mark.parametrize("option", ["max_sentence_length", "input_sentence_size"])
def test_defaults_are_those_of_the_library(option):
    spec = sentencepiece_model_pb2.TrainerSpec.DESCRIPTOR.fields_by_name[option]
    (line,) = (line for line in PAGE.read_text("utf-8").splitlines() if f"`{option}` " in line)
    assert re.search(rf"`{option}` (\d+)", line)[1] == str(spec.default_value)
    assert sentencepiece_model_pb2.TrainerSpec().max_sentence_length == pieces.LONGEST
