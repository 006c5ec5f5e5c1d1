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
# Symbols before and after a text: for fairseq's causal models a text begins with the end of the text before
_AROUND = {TRANSLATION: ([], ["</s>"]), CAUSAL_LM: (["</s>"], [])}
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
    generation = {"beam": 1, "lenpen": 1.0} | _SEARCH
    if recipe.generate is not None:
        generation.update(beam=recipe.generate.beam, lenpen=recipe.generate.lenpen)
        for flag, value in recipe.generate.flags.items():
            name = flag.replace("-", "_")
            if name not in {*_SEARCH, *_LEFT_OUT}:
                raise UserError(
                    f"generate.flags of the run's recipe: {flag} is not exported to transformers. Delete "
                    "it in recipe.yaml, and give `generate` what corresponds to it."
                )
            generation[name] = value
    overrides = {"data": str(text)}
    models, config, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], overrides
    )
    dictionaries = task.source_dictionary, task.target_dictionary
    codec = _codec_of(text, recipe.kind)
    if codec is not None:
        room = models[0].max_positions()
        length = room[0] if isinstance(room, tuple) else room
        write_tokenizer(folder, codec, recipe.kind, dictionaries, length)
    return write_model(folder, models[0], task.target_dictionary, config.criterion, generation)


def _codec_of(text: Path, kind: str) -> Any:
    """The codec of a run's text; None, with a warning, if it cannot be made."""
    if files := bpe_files(text):
        return Gpt2Codec(*map(str, files))
    data = catalogue.TRANSLATION if kind == TRANSLATION else catalogue.LANGUAGE_MODELING
    try:
        return codec_of(text, data)
    # Another program prepared the text; the model can be used without a codec
    except UserError as error:
        log.warning("The folder has no tokenizer. %s", error)
        return None


def write_tokenizer(folder: Path, codec: Any, kind: str, dictionaries: Any, length: int) -> None:
    """Write the files that AutoTokenizer reads: the symbols by id, and the segmentation of raw text.

    Args:
        folder: the folder to write into.
        codec: the codec that `codec_of` returns, or a `Gpt2Codec`.
        kind: the kind of the recipe.
        dictionaries: fairseq's dictionaries of source and target.
        length: the largest number of symbols that the model reads.
    """
    pair = codec.segmentations if isinstance(codec, TranslationCodec) else (codec, codec)
    if isinstance(pair[0], MergeCodec):
        (folder / "merges.codes").write_text(pair[0].text(), "utf-8")
    elif isinstance(codec, Gpt2Codec):
        for path in codec.files:
            shutil.copy(path, folder)
    elif isinstance(pair[0], PieceCodec):
        models = dict.fromkeys(side.processor.serialized_model_proto() for side in pair)
        for name, model in zip(("source.spm", "target.spm"), models):
            (folder / name).write_bytes(model)
    symbols = [list(dictionary.symbols) for dictionary in dictionaries]
    write_json(folder / "vocab.json", {"source": symbols[0], "target": symbols[1]})
    around = _AROUND.get(kind, (["<s>"], ["</s>"]))
    config: dict[str, Any] = {
        "tokenizer_class": "MixtureTokenizer",
        "segmentation": _SEGMENTATIONS[type(pair[0])],
    }
    if isinstance(codec, TranslationCodec):
        config.update(steps=codec.steps, target_language=codec.target)
    config.update(prefix=around[0], suffix=around[1], model_max_length=length)
    if "<mask>" in symbols[0]:
        config["mask_token"] = "<mask>"
    write_json(folder / "tokenizer_config.json", config)


def usage(name: str, kind: str) -> list[str]:
    """Lines of Python that load the model.

    Args:
        name: the name of the folder.
        kind: the kind of the recipe.
    """
    auto = {TRANSLATION: "AutoModelForSeq2SeqLM", CAUSAL_LM: "AutoModelForCausalLM"}.get(
        kind, "AutoModelForMaskedLM"
    )
    return [
        "import moa_fairseq.integrations.mixture_transformer  # registers the model",
        f"from transformers import {auto}, AutoTokenizer",
        "",
        f'model = {auto}.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
    ]


def write_model(
    folder: Path, model: Any, dictionary: Any, criterion: Any, generation: dict[str, Any]
) -> int:
    """Write config.json, model.safetensors and, for models that generate text, generation_config.json.

    Args:
        folder: the folder to write into.
        model: fairseq's model, which is in float64 afterwards.
        dictionary: the dictionary of the target.
        criterion: the settings of the training's criterion, with those of its auxiliary losses.
        generation: beam, lenpen, max_len_b and min_len of fairseq-generate.

    Returns:
        The number of parameters.

    Raises:
        UserError: for a model that cannot be exported, and if safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise UserError("--transformers needs safetensors: pip install safetensors.") from error
    plain: Any = plain_model(model)
    encoder = plain.source_stack.settings if plain.encoder is not None else None
    decoder = plain.decoder.settings if plain.decoder is not None else None
    kind = (encoder is not None, decoder is not None)
    weights = tensors_of(plain, "model.")
    ids = {
        "pad_token_id": dictionary.pad(),
        "bos_token_id": dictionary.bos(),
        "eos_token_id": dictionary.eos(),
    }
    if all(kind):
        ids["decoder_start_token_id"] = dictionary.eos()
    config = {
        "architectures": [_CLASSES[kind]],
        "model_type": "mixture_transformer",
        "dtype": str(next(plain.parameters()).dtype).removeprefix("torch."),
        "encoder_stack": encoder and dataclasses.asdict(encoder),
        "decoder_stack": decoder and dataclasses.asdict(decoder),
        "shared_embedding": all(kind) and plain.decoder.embed_tokens is None,
        "own_output": plain.own_output,
        "is_encoder_decoder": all(kind),
    }
    config.update(ids)
    for name in _LOSS:
        if value := getattr(criterion, name, None):
            config[name] = value if isinstance(value, float) else str(value)
    write_json(folder / "config.json", config)
    if decoder is not None:
        search = {
            "num_beams": generation["beam"],
            "length_penalty": generation["lenpen"],
            "early_stopping": generation["beam"] > 1,
            "max_new_tokens": generation["max_len_b"] + 1,  # including </s>
            "min_new_tokens": generation["min_len"],
            "suppress_tokens": [dictionary.pad()],
        }
        write_json(folder / "generation_config.json", ids | search)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    # safetensors lets only the owner read its file, but a server may run as another user
    (folder / WEIGHTS).chmod((folder / "config.json").stat().st_mode)
    return sum(map(torch.numel, weights.values()))
