"""Parameters of MoH's models outside of fairseq, in millions, and those that the paper prints; Markdown.

    python benchmarks/integrations/parameters.py > results/tables/moh-parameters.md

Needs timm and transformers (bash scripts/setup.sh --integrations). No weights are made.
"""

import timm
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from moa_fairseq.files.utf8 import use_utf8
from moa_fairseq.integrations import hf, vision
from moa_fairseq.integrations.dit import MIXTURES, DiT

# Table 2: dense, MoH
DIT = {"S": (33, 33), "B": (130, 131), "L": (458, 459), "XL": (675, 676)}
# Dense rows of Table 1 that timm has; DeiT is for comparison
TIMM = {
    "FocalNet-B": ("focalnet_base_lrf", 89),
    "CoAtNet-2": ("coatnet_2_224", 75),
    "MViTv2-B": ("mvitv2_base", 52),
    "DeiT-S": ("deit_small_patch16_224", None),
    "DeiT-B": ("deit_base_patch16_224", None),
}
LLAMA3_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def count(model: nn.Module, frozen: bool = False) -> float:
    """Millions of parameters; frozen: also those that are not trained."""
    return sum(p.numel() for p in model.parameters() if frozen or p.requires_grad) / 1e6


def rows() -> list[tuple[str, float, float | None]]:
    """(model, counted, printed) of each."""
    found: list[tuple[str, float, float | None]] = []
    with torch.device("meta"):
        for size, printed in DIT.items():
            found.append(
                (f"DiT-{size}/2, without the fixed positions", count(DiT(size)), printed[0])
            )
            for percent in (90, 75):
                model = DiT(size, MIXTURES[size, percent])
                name = f"MoH-DiT-{size}/2, {percent} % of the heads, with the fixed positions"
                found.append((name, count(model, frozen=True), printed[1]))
        for name, (arch, printed_alone) in TIMM.items():
            found.append(
                (f"{name} (timm: `{arch}`)", count(timm.create_model(arch)), printed_alone)
            )
        for name in ("DeiT-S", "DeiT-B"):
            for router in ("query-norm", "learned"):
                model = timm.create_model(TIMM[name][0])
                heads = model.blocks[0].attn.num_heads
                moh = vision.to_mixture_of_heads(model, heads // 2, heads * 3 // 4, router=router)
                found.append((f"MoH-{name}, 75 %, {router} (ours)", count(moh), None))
        found.append(("LLaMA3-8B", count(LlamaForCausalLM(LlamaConfig(**LLAMA3_8B))), None))
        for router in ("query-norm", "learned"):
            llama = LlamaForCausalLM(LlamaConfig(**LLAMA3_8B))
            moh = hf.to_mixture_of_heads(llama, 16, 24, router=router)
            found.append((f"MoH-LLaMA3-8B, 75 %, {router}", count(moh), None))
        wide = LlamaForCausalLM(LlamaConfig(**{**LLAMA3_8B, "vocab_size": 160_896}))
        moh = hf.to_mixture_of_heads(wide, 16, 24)
        found.append(("MoH-LLaMA3-8B with the 160,896 words of its tuning", count(moh), None))
    return found


def page() -> str:
    lines = ["# Parameters of MoH's models outside of fairseq", ""]
    lines += ["In millions. `python benchmarks/integrations/parameters.py` writes this page.", ""]
    lines += ["| Model | counted | printed |", "| --- | --: | --: |"]
    for name, counted, printed in rows():
        lines.append(
            f"| {name} | {counted:,.2f} | {'' if printed is None else format(printed, ',')} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    use_utf8()
    print(page())
