"""The folder of a trained model that transformers reads: `moa_fairseq.integrations.mixture_transformer`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils

from moa_fairseq.errors import UserError
from moa_fairseq.experiments.convert.plain import plain_model, tensors_of
from moa_fairseq.experiments.json_files import write_json
from moa_fairseq.experiments.recipes.schema import CAUSAL_LM, TRANSLATION, Recipe

_CLASSES = {  # by whether there is an encoder, and a decoder
    (True, True): "MixtureTransformerForConditionalGeneration",
    (False, True): "MixtureTransformerForCausalLM",
    (True, False): "MixtureTransformerForMaskedLM",
}
# Settings of fairseq's criterions that the model's loss has, by the same names
_LOSS = (
    "label_smoothing",
    "balance_loss",
    "load_balance_coef",
    "z_loss_coef",
    "aux_loss_reduce",
    "aux_loss_scale",
)
_SEARCH = {"max_len_b": 200, "min_len": 1}  # fairseq-generate's flags that generate has, and its defaults
_LEFT_OUT = {"skip_invalid_size_inputs_valid_test"}  # … and one that changes no answer


def write(folder: Path, checkpoint: Path, text: Path, recipe: Recipe) -> int:
    """Write the model of a run.

    Args:
        folder: where its files go.
        checkpoint: of the run.
        text: the binarised folder that the run keeps, with its dictionaries.
        recipe: of the run.

    Returns:
        The number of parameters.

    Raises:
        UserError: as `write_model`, and for flags of the beam search that `generate` does not have.
    """
    generation = {"beam": 1, "lenpen": 1.0, **_SEARCH}
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
    models, config, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], overrides)
    return write_model(folder, models[0], task.target_dictionary, config.criterion, generation)


def usage(name: str, kind: str) -> list[str]:
    """Lines of Python that load the model.

    Args:
        name: of the folder.
        kind: of the recipe.
    """
    auto = {TRANSLATION: "AutoModelForSeq2SeqLM", CAUSAL_LM: "AutoModelForCausalLM"}.get(
        kind, "AutoModelForMaskedLM"
    )
    return [
        "import moa_fairseq.integrations.mixture_transformer  # registers the model",
        f"from transformers import {auto}",
        "",
        f'model = {auto}.from_pretrained("{name}")',
    ]


def write_model(folder: Path, model: Any, dictionary: Any, criterion: Any, generation: dict[str, Any]) -> int:
    """Write config.json, model.safetensors and, of models that generate, generation_config.json.

    Args:
        folder: where they go.
        model: fairseq's; in float64 afterwards.
        dictionary: of what it writes.
        criterion: the settings of the training's criterion, of which its auxiliary losses are read.
        generation: beam, lenpen, max_len_b and min_len, as fairseq-generate takes them.

    Returns:
        The number of parameters.

    Raises:
        UserError: for a model that is not exported, and where safetensors is not installed.
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
        "decoder_start_token_id": dictionary.eos() if all(kind) else None,
    }
    loss = {name: getattr(criterion, name, None) for name in _LOSS}
    write_json(
        folder / "config.json",
        {
            "architectures": [_CLASSES[kind]],
            "model_type": "mixture_transformer",
            "dtype": str(next(plain.parameters()).dtype).removeprefix("torch."),
            "encoder_stack": encoder and dataclasses.asdict(encoder),
            "decoder_stack": decoder and dataclasses.asdict(decoder),
            "shared_embedding": all(kind) and plain.decoder.embed_tokens is None,
            "own_output": plain.own_output,
            "is_encoder_decoder": all(kind),
            **{name: value for name, value in ids.items() if value is not None},
            **{
                name: value if isinstance(value, float) else str(value)
                for name, value in loss.items()
                if value
            },
        },
    )
    if decoder is not None:
        write_json(
            folder / "generation_config.json",
            {
                **{name: value for name, value in ids.items() if value is not None},
                "num_beams": generation["beam"],
                "length_penalty": generation["lenpen"],
                "early_stopping": generation["beam"] > 1,
                "max_new_tokens": generation["max_len_b"] + 1,  # with the end
                "min_new_tokens": generation["min_len"],
                "suppress_tokens": [dictionary.pad()],
            },
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in weights.values())
