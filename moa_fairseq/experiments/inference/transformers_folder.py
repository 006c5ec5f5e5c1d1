"""Write a trained model as a folder that `moa_fairseq.integrations.mixture_transformer` reads."""

import dataclasses
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.convert.plain import WEIGHTS, plain_model, tensors_of
from moa_fairseq.experiments.data import catalogue
from moa_fairseq.experiments.data.gpt2_files import bpe_files
from moa_fairseq.experiments.inference.text_codec import codec_of
from moa_fairseq.experiments.recipes.schema import CAUSAL_LM, TRANSLATION, Recipe
from moa_fairseq.experiments.records.json_files import write_json
from moa_fairseq.text.codecs import (
    ByteCodec,
    Gpt2Codec,
    MergeCodec,
    PieceCodec,
    TranslationCodec,
    WordCodec,
)

_CLASSES = {  # (has an encoder, has a decoder) → class in transformers
    (True, True): "MixtureTransformerForConditionalGeneration",
    (False, True): "MixtureTransformerForCausalLM",
    (True, False): "MixtureTransformerForMaskedLM",
}
# Settings of fairseq's criterions that the configuration of the exported model has with the same names
_LOSS = (
    "label_smoothing",
    "balance_loss",
    "load_balance_coef",
    "z_loss_coef",
    "aux_loss_reduce",
    "aux_loss_scale",
)
# Flags of fairseq-generate that transformers' `generate` also has → fairseq's default
_SEARCH = {"max_len_b": 200, "min_len": 1}
_LEFT_OUT = {"skip_invalid_size_inputs_valid_test"}  # a flag that changes no translation
_SEGMENTATIONS = {
    MergeCodec: "merges",
    PieceCodec: "pieces",
    ByteCodec: "bytes",
    Gpt2Codec: "gpt2",
    WordCodec: "words",
}
# Kind of the recipe → symbols before and after a text. For fairseq's causal models a text begins with the end
# of the text before
_BORDERS = {TRANSLATION: ([], ["</s>"]), CAUSAL_LM: (["</s>"], [])}
_AUTO_CLASSES = {TRANSLATION: "AutoModelForSeq2SeqLM", CAUSAL_LM: "AutoModelForCausalLM"}
log = logging.getLogger(__name__)


def write(folder: Path, checkpoint: Path, text: Path, recipe: Recipe) -> int:
    """Write the model and the tokenizer of a run.

    Args:
        folder: the folder to write into.
        checkpoint: the checkpoint of the run.
        text: the binarised folder that the run keeps, with its dictionaries.
        recipe: the recipe of the run.

    Returns:
        The number of parameters.

    Raises:
        UserError: in the cases of `write_model`, and for flags of the beam search that transformers'
            `generate` lacks.
    """
    settings = _search_settings(recipe)
    models, config, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], {"data": str(text)}
    )
    codec = _codec_of(text, recipe.kind)
    if codec is not None:
        longest = models[0].max_positions()
        if isinstance(longest, tuple):  # of source and target
            longest = longest[0]
        dictionaries = task.source_dictionary, task.target_dictionary
        write_tokenizer(folder, codec, recipe.kind, dictionaries, longest)
    return write_model(folder, models[0], task.target_dictionary, config.criterion, settings)


def _search_settings(recipe: Recipe) -> dict[str, Any]:
    """The flags of fairseq-generate that `write_model` takes; UserError for one that it does not."""
    settings = {"beam": 1, "lenpen": 1.0} | _SEARCH
    if recipe.generate is None:
        return settings
    settings |= {"beam": recipe.generate.beam, "lenpen": recipe.generate.lenpen}
    for flag, value in recipe.generate.flags.items():
        name = flag.replace("-", "_")
        if name not in {*_SEARCH, *_LEFT_OUT}:
            raise UserError(
                f"generate.flags of the run's recipe: {flag} is not exported to transformers. Delete it in "
                "recipe.yaml, and give `generate` what corresponds to it."
            )
        settings[name] = value
    return settings


def _codec_of(text: Path, kind: str) -> Any:
    """The codec of a run's text; None, with a warning, if it cannot be made."""
    if files := bpe_files(text):
        return Gpt2Codec(*map(str, files))
    data = catalogue.TRANSLATION if kind == TRANSLATION else catalogue.LANGUAGE_MODELING
    try:
        return codec_of(text, data)
    # Another program prepared the text; the model can be used without a codec
    except UserError as error:
        log.warning(f"The folder has no tokenizer. {error}")
        return None


def write_tokenizer(folder: Path, codec: Any, kind: str, dictionaries: Any, longest: int) -> None:
    """Write the files that AutoTokenizer reads: the symbols by id, and the segmentation of raw text.

    Args:
        folder: the folder to write into.
        codec: the codec that `codec_of` returns, or a `Gpt2Codec`.
        kind: the kind of the recipe.
        dictionaries: fairseq's dictionaries of source and target.
        longest: the largest number of symbols that the model reads.
    """
    is_translation = isinstance(codec, TranslationCodec)
    source, target = codec.segmentations if is_translation else (codec, codec)
    _write_segmentations(folder, source, target)
    symbols = [list(dictionary.symbols) for dictionary in dictionaries]
    write_json(folder / "vocab.json", {"source": symbols[0], "target": symbols[1]})
    prefix, suffix = _BORDERS.get(kind, (["<s>"], ["</s>"]))
    config: dict[str, Any] = {
        "tokenizer_class": "MixtureTokenizer",
        "segmentation": _SEGMENTATIONS[type(source)],
        "prefix": prefix,
        "suffix": suffix,
        "model_max_length": longest,
    }
    if is_translation:
        config |= {"steps": codec.steps, "target_language": codec.target}
    if "<mask>" in symbols[0]:
        config["mask_token"] = "<mask>"
    write_json(folder / "tokenizer_config.json", config)


def _write_segmentations(folder: Path, source: Any, target: Any) -> None:
    """Write what the codecs of source and target read."""
    if isinstance(source, MergeCodec):  # both languages have the same merges
        (folder / "merges.codes").write_text(source.text(), "utf-8")
    elif isinstance(source, Gpt2Codec):
        for path in source.files:
            shutil.copy(path, folder)
    elif isinstance(source, PieceCodec):
        # One file if both languages have the same pieces
        models = dict.fromkeys(side.processor.serialized_model_proto() for side in (source, target))
        for name, model in zip(("source.spm", "target.spm"), models):
            (folder / name).write_bytes(model)


def write_model(
    folder: Path, model: Any, dictionary: Any, criterion: Any, settings: dict[str, Any]
) -> int:
    """Write config.json, model.safetensors and, for models that generate text, generation_config.json.

    The comparison with the plain model leaves fairseq's model in float64.

    Args:
        folder: the folder to write into.
        model: fairseq's model.
        dictionary: the dictionary of the target.
        criterion: the settings of the training's criterion, with those of its auxiliary losses.
        settings: beam, lenpen, max_len_b and min_len of fairseq-generate.

    Returns:
        The number of parameters.

    Raises:
        UserError: for a model that cannot be exported, and if safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise UserError("--transformers needs safetensors: pip install safetensors.") from error
    plain = plain_model(model)
    ids = {
        "pad_token_id": dictionary.pad(),
        "bos_token_id": dictionary.bos(),
        "eos_token_id": dictionary.eos(),
    }
    config = _model_config(plain)
    if config["is_encoder_decoder"]:
        ids["decoder_start_token_id"] = dictionary.eos()
    config |= ids
    for name in _LOSS:
        if value := getattr(criterion, name, None):
            config[name] = value if isinstance(value, float) else str(value)
    write_json(folder / "config.json", config)
    if plain.decoder is not None:
        search = {
            "num_beams": settings["beam"],
            "length_penalty": settings["lenpen"],
            "early_stopping": settings["beam"] > 1,
            "max_new_tokens": settings["max_len_b"] + 1,  # including </s>
            "min_new_tokens": settings["min_len"],
            "suppress_tokens": [dictionary.pad()],
        }
        write_json(folder / "generation_config.json", ids | search)
    weights = tensors_of(plain, "model.")
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    # safetensors lets only the owner read its file, but a server may run as another user
    (folder / WEIGHTS).chmod((folder / "config.json").stat().st_mode)
    return sum(map(torch.numel, weights.values()))


def _model_config(plain: Any) -> dict[str, Any]:
    """The configuration of the plain model in transformers, without ids and losses."""
    has_encoder = plain.encoder is not None
    has_decoder = plain.decoder is not None
    is_translation = has_encoder and has_decoder
    return {
        "architectures": [_CLASSES[has_encoder, has_decoder]],
        "model_type": "mixture_transformer",
        "dtype": str(next(plain.parameters()).dtype).removeprefix("torch."),
        "encoder_stack": dataclasses.asdict(plain.source_stack.settings) if has_encoder else None,
        "decoder_stack": dataclasses.asdict(plain.decoder.settings) if has_decoder else None,
        "shared_embedding": is_translation and plain.decoder.embed_tokens is None,
        "own_output": plain.own_output,
        "is_encoder_decoder": is_translation,
    }


def usage(name: str, kind: str) -> list[str]:
    """Lines of Python that load the model.

    Args:
        name: the name of the folder.
        kind: the kind of the recipe.
    """
    auto = _AUTO_CLASSES.get(kind, "AutoModelForMaskedLM")
    return [
        "import moa_fairseq.integrations.mixture_transformer  # registers the model",
        f"from transformers import {auto}, AutoTokenizer",
        "",
        f'model = {auto}.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
    ]
