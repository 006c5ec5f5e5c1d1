"""MoH (arXiv 2410.11842) in causal language models of Hugging Face's transformers.

`to_mixture_of_heads` converts a model in place. After an import of this module, AutoConfig and
AutoModelForCausalLM read what `save_pretrained` wrote. A mixture made of a `llama` has the model type
`moh_llama`.
"""

import copy
import functools
import inspect
import threading
import warnings
from dataclasses import asdict
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING as CAUSAL
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

try:  # transformers 5 stacks the experts' matrices of the checkpoints of some model types
    from transformers import conversion_mapping
except ImportError:
    conversion_mapping = None

from moa_fairseq.errors import UserError
from moa_fairseq.integrations.heads import balance_loss, collect_routings, install
from moa_fairseq.integrations.mixture_settings import OUTPUTS, MixtureSettings
from moa_fairseq.layers.routing import Routing

_PREFIX = "MoH"
_IGNORED = -100  # the label of a position without a loss


def to_mixture_of_heads(
    model: PreTrainedModel,
    shared_heads: int | None = None,
    active: int | None = None,
    **settings: Any,
) -> PreTrainedModel:
    """Convert a dense causal language model into a mixture of heads, in place.

    Args:
        model: a model of a class that AutoModelForCausalLM loads, before adapters are added. Its parameters
            stay.
        shared_heads, active, settings: the fields of `MixtureSettings`.

    Returns:
        The model, now of the class `MoH<Name>` with a config of the type `moh_<type>`.

    Raises:
        UserError: for a model that cannot be converted, which is then unchanged.
    """
    _check_dense(model)
    chosen = MixtureSettings.of({"shared_heads": shared_heads, "active": active, **settings})
    mixture = mixture_class(type(model))
    config = copy.deepcopy(model.config)  # other models may share the old one
    config.__class__ = mixture.config_class
    config.moh = asdict(chosen)
    _install(model, config)
    for module in model.modules():
        if getattr(module, "config", None) is model.config and module is not model:
            module.config = config
    model.config = config
    model.__class__ = mixture
    return model


def _check_dense(model: Any) -> None:
    """Refuse what is not a whole causal language model of transformers, without mixtures."""
    kind = type(model).__name__
    if isinstance(getattr(model, "config", None), _MixtureConfig):
        raise UserError(
            f"{kind} is a mixture of heads already: load the dense model, and convert it."
        )
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"{kind} is not a transformers model: convert the model before you wrap it."
        )
    if not _is_causal_lm(type(model)):
        remedy = "leave it dense"
        if type(model.config) in CAUSAL and not model.config.is_encoder_decoder:
            remedy = "load it with AutoModelForCausalLM"
        raise UserError(
            f"{kind} is not a causal language model, and only those can be converted: {remedy}."
        )
    if (getattr(model, "tp_size", None) or 1) > 1:
        raise UserError(f"{kind} is split by tensor parallelism: load it on one device.")


def _install(model: PreTrainedModel, config: Any) -> None:
    """Add a mixture to each attention. Raises UserError before anything is changed."""
    settings = MixtureSettings.of(config.moh)
    kind = type(model).__name__
    if config.is_encoder_decoder or config.get_text_config() is not config:
        raise UserError(f"{kind} is not a text-only decoder, and only those can be converted.")
    heads = getattr(config, "num_attention_heads", None)
    modules = {path: m for path, m in model.named_modules() if "Attention" in type(m).__name__}
    if not modules or heads is None:
        raise UserError(f"{kind} has no attention heads to route, so it cannot be converted.")
    names = (settings.output,) if settings.output else OUTPUTS
    attentions = []
    for module in modules.values():
        output = next((name for name in names if hasattr(module, name)), None)
        if output is not None:
            # In Laguna, layers differ in heads; the config of Bart has the number of the encoder
            num_heads = getattr(module, "num_heads", heads)
            attentions.append((module, output, config.hidden_size, num_heads))
    if not attentions:
        parts = {name for m in modules.values() for name, _ in m.named_children()}
        raise UserError(
            f"{kind} has no {' or '.join(names)} in its attentions, but {', '.join(sorted(parts))}: give the "
            "output projection's name as output. If none of these is it, the model cannot be converted."
        )
    depth = config.num_hidden_layers
    count = len(attentions)
    if count != depth and settings.layers is None:
        raise UserError(
            f"{kind} has {depth} layers, but {count} attentions ({', '.join([*modules][:2])} …): instead "
            f"of shared_heads and active give layers, {count} entries of (shared heads, active) or None."
        )
    install(attentions, settings, model.dtype)


class _MixtureConfig:
    """The base class of the configs of mixtures."""


def _is_causal_lm(base: Any) -> bool:
    config = getattr(base, "config_class", None)
    return config in CAUSAL and CAUSAL[config] is base


_making = threading.Lock()


def mixture_class(base: Any) -> Any:
    """The mixture class of a model class, such as MoHLlamaForCausalLM, which the Auto classes then load.

    In training its forward pass adds the balance loss, times `balance`, to the loss.

    Args:
        base: a class that AutoModelForCausalLM loads.
    """
    with _making:  # pickle could not distinguish two classes of the same name
        return _mixture_class(base)


@functools.cache
def _mixture_class(base: Any) -> Any:
    base_config: Any = base.config_class
    names = list(inspect.signature(base.forward).parameters)[1:]

    class Config(_MixtureConfig, base_config):
        model_type = f"moh_{base_config.model_type}"
        moh: dict[str, Any] | None = None  # the fields of MixtureSettings

    class Model(base):
        config_class = Config

        def __init__(self, config: Any, *args: Any, **kwargs: Any):
            if not getattr(config, "moh", None):
                raise UserError(
                    f"The config of a {type(self).__name__} needs `moh`, the settings of its mixtures: "
                    "convert a dense model with to_mixture_of_heads."
                )
            super().__init__(config, *args, **kwargs)
            _install(self, config)

        @functools.wraps(base.forward)  # Trainer and generate read the signature
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not (self.config.moh["balance"] and self.training):
                return super().forward(*args, **kwargs)
            inputs = dict(zip(names, args)) | kwargs
            if inputs.get("labels") is None:
                if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():
                    warnings.warn(
                        "no labels were given, so there is no loss, and no balance term is added",
                        stacklevel=2,
                    )
                return super().forward(*args, **kwargs)
            with collect_routings(self) as routings:
                out = super().forward(*args, **kwargs)
            if not routings:  # every head is shared
                return out
            loss = out[0] + _balance_term(routings, inputs, self.config, out[0].device)
            if isinstance(out, tuple):
                return (loss, *out[1:])
            out.loss = loss
            return out

    Config.__name__ = Config.__qualname__ = _PREFIX + base_config.__name__
    Model.__name__ = Model.__qualname__ = _PREFIX + base.__name__
    globals().update({Config.__name__: Config, Model.__name__: Model})  # pickle looks here
    AutoConfig.register(Config.model_type, Config, exist_ok=True)
    AutoModelForCausalLM.register(Config, Model, exist_ok=True)
    # Trainer's label smoothing shifts labels only for the classes that are named here
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[Config.model_type] = Model.__name__
    if conversion_mapping is not None:
        rules = conversion_mapping.get_checkpoint_conversion_mapping(base_config.model_type)
        if rules is not None:
            conversion_mapping.register_checkpoint_conversion_mapping(
                Config.model_type, rules, overwrite=True
            )
    return Model


def _balance_term(
    routings: list[Routing], inputs: dict[str, Any], config: Any, device: torch.device
) -> Tensor:
    """β times the balance loss, divided as Trainer divides the loss of a micro-batch."""
    term: Tensor = config.moh["balance"] * balance_loss(
        routings, inputs.get("attention_mask"), device
    )
    items = inputs.get("num_items_in_batch")
    if items is None:
        return term
    # The losses of micro-batches are summed, each divided by the number of labels in the update
    count = inputs["labels"][..., 1:].ne(_IGNORED).sum()
    return term * (count / items).to(device)


def _register_lazily(model_type: str) -> None:
    """Let AutoConfig make the classes of a mixture when it reads a folder of type `moh_<model_type>`."""

    class LazyConfig:
        @classmethod
        def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
            base = CAUSAL[CONFIG_MAPPING[model_type]]
            return mixture_class(base).config_class.from_dict(config_dict, **kwargs)

    AutoConfig.register(f"moh_{model_type}", LazyConfig, exist_ok=True)


for _model_type in tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
    _register_lazily(_model_type)


def __getattr__(name: str) -> Any:
    """Make the class MoH<Name> if a pickle needs it before it exists."""
    base = None
    if name.startswith(_PREFIX):
        base = getattr(transformers, name[len(_PREFIX) :], None)
    if base in CAUSAL:  # a config
        base = CAUSAL[base]
    if not _is_causal_lm(base):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    mixture_class(base)
    return globals()[name]
