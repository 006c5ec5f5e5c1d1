"""Random decoders of a few thousand weights, in float64: 8 heads, 2 for keys, two layers or three."""

import inspect

import pytest

try:
    import transformers
    from transformers import AutoModelForCausalLM, LlamaForCausalLM  # noqa: F401 (what loads its libraries)
except (ImportError, OSError, RuntimeError) as error:
    pytest.skip(
        f"bash scripts/test.sh --integrations runs these, in an environment of their own ({error})",
        allow_module_level=True,
    )

import torch

from moa_fairseq.integrations.hf import to_mixture_of_heads

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
HEADS = 8
VOCABULARY = 50
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 4, "sliding_window": 6, "query_pre_attn_scalar": 4}
# Queries of their own: both routers. The windows are shorter than the sequences.
SEPARATE = {
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 6}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen2-window": (
        "Qwen2",
        {**GROUPED, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 4}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", {**GEMMA, "num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "olmo2": ("Olmo2", GROUPED),
    "opt": ("OPT", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "phi": ("Phi", SIZES),
}
# Queries, keys and values in one projection: the learned router.
FUSED = {
    "gpt_neox": ("GPTNeoX", {**SIZES, "rotary_pct": 0.5}),
    "phi3": ("Phi3", GROUPED),
    "gpt2": ("GPT2", SIZES),
    "falcon": ("Falcon", {**SIZES, "num_kv_heads": 2, "new_decoder_architecture": True}),
}
KINDS = {**SEPARATE, **FUSED}
CLASSES = {
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
}
DTYPE = "dtype" if VERSION >= (4, 56) else "torch_dtype"


def dense(kind="llama", seed=0, dtype=torch.float64, **changes):
    """A model of this kind in evaluation mode; changes: of its config."""
    name, sizes = KINDS.get(kind, (kind, GROUPED))
    config_name, model_name = CLASSES.get(kind, (f"{name}Config", f"{name}ForCausalLM"))
    if not hasattr(transformers, model_name):
        pytest.skip(f"transformers {transformers.__version__} has no {model_name}")
    torch.manual_seed(seed)
    changes = {
        **sizes,
        "attn_implementation": "eager" if kind == "gemma2" else "sdpa",
        **changes,
    }
    config = getattr(transformers, config_name)(**changes)
    torch.set_default_dtype(dtype)  # from_pretrained makes constants in the model's dtype, too
    try:
        return getattr(transformers, model_name)(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


def mixture(
    kind="llama", shared_heads=2, active=5, router="query-norm", seed=0, changes=(), **settings
):
    """`dense(kind, seed)` as a mixture of heads; the learned router's weights are large enough to matter."""
    model = to_mixture_of_heads(
        dense(kind, seed, **dict(changes)), shared_heads, active, router=router, **settings
    )
    for name, parameter in model.named_parameters():
        if ".mixture." in name:
            torch.nn.init.normal_(parameter)
    return model.eval()


def mixtures_of(model):
    """Its mixtures, by depth."""
    return [module for module in model.modules() if type(module).__name__ == "HeadMixture"]


def cache_keyword(model):
    """By which name its call takes a cache."""
    return (
        "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    )


def tokens(batch=2, length=11, seed=1):
    """Ids [B, T] without padding."""
    return torch.randint(
        2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed)
    )


def reload(folder, **options):
    """What AutoModelForCausalLM reads from a folder, in float64."""
    return AutoModelForCausalLM.from_pretrained(
        folder, **{DTYPE: torch.float64, **options}
    ).eval()
