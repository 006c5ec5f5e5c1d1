"""A fairseq model as the plain Transformer of `layers.transformer`, which needs no fairseq."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from fairseq.models import FairseqEncoderDecoderModel
from fairseq.models.roberta import RobertaModel
from fairseq.modules.adaptive_input import AdaptiveInput
from torch import Tensor, nn

from moa_fairseq.errors import UserError
from moa_fairseq.layers.sigma_moe import SigmaMoESettings
from moa_fairseq.layers.transformer import MixtureTransformer
from moa_fairseq.layers.transformer_layer import ACTIVATIONS, StackSettings
from moa_fairseq.plugin.families import settings_of

WEIGHTS = "model.safetensors"
# Of logits in float64, relative to the largest; the logits of equal models differ by 1e-13
TOLERANCE = 1e-6
# Endings of names in fairseq's state that are no weights
_NO_WEIGHTS = (".version", "._float_tensor")
# Settings that change a model's outputs or its training, and that the plain model lacks → the value for "off"
_REFUSED: dict[str, Any] = {
    "base_layers": 0,
    "char_inputs": False,
    "cross_self_attention": False,
    "decoder_layerdrop": 0,
    "encoder_layerdrop": 0,
    "quant_noise_pq": 0,
    "quant_noise_scalar": 0,
    "scale_attn": False,
    "scale_fc": False,
    "scale_heads": False,
    "scale_resids": False,
}


def plain_model(model: Any) -> MixtureTransformer:
    """The plain Transformer with a fairseq model's weights.

    Args:
        model: a model of fairseq or of this package, for translation, masked or causal language modelling.
            Afterwards it is in float64 and in evaluation mode.

    Returns:
        The plain model in the dtype that the given one had; both have been found to give equal logits.

    Raises:
        UserError: for a model with a flag or a parameter that the plain model lacks; the message names it.
    """
    encoder: Any = None
    decoder: Any = None
    if isinstance(model, RobertaModel):
        encoder = model.encoder.sentence_encoder
        output = model.encoder.lm_head
    elif hasattr(model, "decoder"):
        decoder = model.decoder
        output = decoder.output_projection
        if isinstance(model, FairseqEncoderDecoderModel):
            encoder = model.encoder
    else:
        raise UserError(f"{type(model).__name__} is no translation model and no language model.")
    stacks = [stack for stack in (encoder, decoder) if stack is not None]
    for stack in stacks:
        _refuse(stack.cfg)
    first = stacks[0].embed_tokens
    last = stacks[-1].embed_tokens
    plain = MixtureTransformer(
        encoder=None if encoder is None else _settings(encoder),
        decoder=None if decoder is None else _settings(decoder),
        shared_embedding=len(stacks) == 2 and first.weight is last.weight,
        own_output=output is not None and output.weight is not last.weight,
    )
    _load(plain, model)
    _compare(plain, model)
    return plain


def _refuse(cfg: Any) -> None:
    """Raise UserError for a setting that the plain model lacks."""
    for name, off in _REFUSED.items():
        value = getattr(cfg, name, off)
        if value not in (off, None):
            flag = f"--{name.replace('_', '-')}"
            raise UserError(
                f"{flag} {value}: models with it are not exported to transformers. Export the run without "
                "--transformers, or train without the flag."
            )
    if cfg.activation_fn not in ACTIVATIONS:
        activations = ", ".join(ACTIVATIONS)
        raise UserError(
            f"--activation-fn {cfg.activation_fn} is not exported; those that are: {activations}."
        )


def _settings(stack: Any) -> StackSettings:
    """The settings of fairseq's encoder or decoder as the plain model takes them."""
    cfg = stack.cfg
    causal = hasattr(stack, "output_projection")
    side = cfg.decoder if causal else cfg.encoder
    # A model without a family has fairseq's own attention, which is dense
    is_ours = getattr(cfg, "attention_family", None) is not None
    sigma_moe = {}
    if is_ours and cfg.sigma_moe_num_experts:
        names = [field.name for field in dataclasses.fields(SigmaMoESettings)]
        sigma_moe = {name: getattr(cfg, name) for name in names}
    embedding = stack.embed_tokens
    is_adaptive = isinstance(embedding, AdaptiveInput)
    softmax = getattr(stack, "adaptive_softmax", None)
    layer = stack.layers[0]
    has_memory = getattr(layer, "encoder_attn", None) is not None
    position_embedding = "none"
    if stack.embed_positions is not None:
        position_embedding = "learned" if side.learned_pos else "sinusoidal"
    learned = position_embedding == "learned"
    positions = _get(cfg, "positions", None)
    return StackSettings(
        family=cfg.attention_family if is_ours else "dense",
        attention=dataclasses.asdict(settings_of(cfg)) if is_ours else {},
        vocab_size=embedding.cutoff[-1] if is_adaptive else embedding.num_embeddings,
        padding_idx=stack.padding_idx,
        embed_dim=side.embed_dim,
        ffn_embed_dim=side.ffn_embed_dim,
        layers=len(stack.layers),
        attention_heads=side.attention_heads,
        causal=causal,
        memory_dim=cfg.encoder.embed_dim if has_memory else None,
        input_dim=embedding.embedding_dim,
        output_dim=stack.output_embed_dim if causal else None,
        normalize_before=side.normalize_before,
        final_norm=stack.layer_norm is not None,
        embedding_norm=stack.layernorm_embedding is not None,
        embedding_scale=stack.embed_scale,
        position_embedding=position_embedding,
        position_rows=stack.embed_positions.num_embeddings if learned else 0,
        positions=None if positions in ("learned", "sinusoidal") else positions,
        head_gate=_get(cfg, "head_gate", "none"),
        output_scale=_get(cfg, "attention_output_scale", 1.0),
        activation=cfg.activation_fn,
        gated=_get(cfg, "gated_feed_forward", False),
        rms_norm=_get(cfg, "rms_norm", False),
        shortcuts=hasattr(layer, "shortcuts"),
        adaptive_input=_adaptive_input(embedding, cfg) if is_adaptive else {},
        adaptive_softmax={} if softmax is None else _adaptive_softmax(softmax, cfg),
        sigma_moe=sigma_moe,
        expert_backend=getattr(cfg, "expert_backend", "auto"),
        dropout=cfg.dropout,
        activation_dropout=cfg.activation_dropout or cfg.relu_dropout or 0.0,
        attention_dropout=cfg.attention_dropout,
        output_dropout=_get(cfg, "output_dropout", 0.0) if causal else 0.0,
    )


def _get(settings: Any, name: str, default: Any) -> Any:
    """A setting, or the default if the model has no such setting, or None."""
    return getattr(settings, name, None) or default


def _adaptive_input(embedding: AdaptiveInput, cfg: Any) -> dict[str, Any]:
    """The settings of adaptive inputs."""
    return {
        "cutoffs": embedding.cutoff,
        "initial_dim": embedding.weights_for_band(0)[0].size(1),
        "factor": cfg.adaptive_input_factor,
    }


def _adaptive_softmax(softmax: Any, cfg: Any) -> dict[str, Any]:
    """The settings of an adaptive softmax."""
    return {
        "cutoffs": softmax.cutoff,
        "factor": softmax.factor,
        "tied": cfg.tie_adaptive_weights,
        "tied_projections": cfg.tie_adaptive_proj,
        "dropout": softmax.dropout_module.p,
    }


def _load(plain: nn.Module, model: nn.Module) -> None:
    """Copy the weights by name; raise UserError if the plain model has other weights.

    A tied weight has several names in fairseq, but one in the plain model.
    """
    weights = model.state_dict()
    names = list(plain.state_dict())
    loaded = {name: weights[name] for name in names if name in weights}
    missing = [name for name in names if name not in weights]
    tied = {tensor.data_ptr() for tensor in loaded.values()}
    unused = []
    for name, tensor in weights.items():
        if not name.endswith(_NO_WEIGHTS) and tensor.data_ptr() not in tied:
            unused.append(name)
    if missing or unused:
        listed = ", ".join([*unused, *missing][:3])
        raise UserError(
            f"The model has parts that are not exported to transformers, or lacks some ({listed}): export "
            "the run without --transformers."
        )
    plain.to(next(model.parameters()).dtype).load_state_dict(loaded)


@torch.no_grad()
def _compare(plain: MixtureTransformer, model: Any) -> None:
    """Raise UserError if the two models' logits differ, in float64, for random sentences with padding."""
    dtype = next(plain.parameters()).dtype
    model.double().eval()
    plain.double().eval()
    generator = torch.Generator().manual_seed(0)
    last = plain.source_stack if plain.decoder is None else plain.decoder
    ids, padding = _random_sentences(last.settings, generator)
    if plain.encoder is None or plain.decoder is None:
        got, _ = plain(ids, padding=padding)
        expected = model(ids)[0]
    else:
        source, source_padding = _random_sentences(plain.source_stack.settings, generator)
        got, _ = plain(source, ids, source_padding, padding)
        expected = model(source, (~source_padding).sum(1), ids)[0]
    if getattr(getattr(model, "decoder", None), "adaptive_softmax", None) is not None:
        expected = model.decoder.adaptive_softmax.get_log_prob(expected, None)
    largest = expected[~padding].abs().max().clamp_min(1.0)
    difference = (got - expected)[~padding].abs().max() / largest
    if not difference < TOLERANCE:
        raise UserError(
            f"The exported model's logits differ from those of fairseq's model by {difference:.1e}, so some "
            "setting of it is not exported: export the run without --transformers, and report its flags."
        )
    plain.to(dtype)


def _random_sentences(settings: StackSettings, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two sentences of random words, and which of them are padding, [2, 7] each."""
    symbols = settings.vocab_size
    ids = torch.randint(min(4, symbols - 1), symbols, (2, 7), generator=generator)
    ids[1, 5:] = settings.padding_idx
    return ids, ids.eq(settings.padding_idx)


def tensors_of(plain: nn.Module, prefix: str) -> dict[str, Tensor]:
    """Copies of the weights by name; safetensors refuses weights that share memory.

    Args:
        plain: the plain model.
        prefix: a prefix of all names.
    """
    return {
        prefix + name: tensor.clone().contiguous() for name, tensor in plain.state_dict().items()
    }


def weights_of(folder: Path, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in a folder of transformers, by the names of a fairseq checkpoint.

    Args:
        folder: a folder that `moa-fairseq export --transformers` or `save_pretrained` wrote.
        like: the weights of a fairseq checkpoint of the same model; weights that are tied there stay tied.

    Raises:
        UserError: if the two models differ: one lacks a weight, or a weight has another shape.
    """
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise UserError("--to fairseq needs safetensors: pip install safetensors.") from error
    path = folder / WEIGHTS
    if not path.is_file():
        raise UserError(f"{path} is missing: name a folder of `moa-fairseq export --transformers`.")
    state = {key.removeprefix("model."): tensor for key, tensor in load_file(path).items()}
    wrong = [name for name in state if name not in like]
    tied = {like[name].data_ptr(): state[name] for name in state if name in like}
    weights = {}
    for name, old in like.items():
        new = state.get(name, tied.get(old.data_ptr()))
        if new is None and name.endswith(_NO_WEIGHTS):
            new = old
        if new is None or new.shape != old.shape:
            wrong.append(name)
        else:
            weights[name] = new
    if wrong:
        raise UserError(
            f"{path} and --like are not the same model ({', '.join(wrong[:3])}): name a checkpoint of the "
            "run that was exported."
        )
    return weights
