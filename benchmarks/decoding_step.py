"""One step of a small Llama whose attention is each family's: Python calls, and seconds.

    python benchmarks/decoding_step.py --calls         only the Python calls, which any CPU counts
    python benchmarks/decoding_step.py                 also seconds; on a GPU compiled steps are CUDA graphs
    python benchmarks/decoding_step.py --calls --before NAME   keep the calls as those of commit NAME

Six layers read a prompt; then each step gives one token per text. growing, static: eager, with that cache;
compiled: the whole decoder by torch.compile (mode "reduce-overhead" on a GPU), with the static cache. Llama
is that of transformers, where it is installed.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _bench import arguments, take_turns
from host import python_calls
from torch import Tensor, nn

from moa_fairseq import layers
from moa_fairseq.experiments.recipes.hardware import detect_hardware
from moa_fairseq.files import atomic_write

LAYERS = 6
PROMPT, STEPS = 32, 64
TEXTS = {"cpu": (1, 8), "cuda": (1, 32)}
WIDTH, HEADS, SYMBOLS = {False: 512, True: 32}, 8, {False: 32000, True: 50}
SETTINGS = {"query_key_norm": "head", "rope_base": 500_000.0, "window": 48}
Step = Callable[[Tensor], Tensor]


def attentions(width: int) -> dict[str, Callable[[], nn.Module]]:
    """An attention of each family that can have a static cache, by name."""
    dim = width // HEADS
    common = {"positions": "rope", "self_attention": True}
    experts = {"expert_dim": dim, **common}
    halves = {"num_experts": 16, "experts_per_token": 8, **experts}
    return {
        "dense": lambda: layers.DenseAttention(width, HEADS, bias=False, **common),
        "MoA": lambda: layers.MixtureOfAttention(width, **halves),
        "MoA, settings": lambda: layers.MixtureOfAttention(width, **halves, **SETTINGS),
        "GQE": lambda: layers.GroupedQueryExperts(
            width, gqe_groups=4, num_experts=4, experts_per_token=2, **experts
        ),
        "MoH": lambda: layers.MixtureOfHeads(
            width, HEADS, moh_shared_heads=2, experts_per_token=4, bias=False, **common
        ),
        "SwitchHead": lambda: layers.SwitchHeadAttention(
            width, switchhead_heads=2, num_experts=4, experts_per_token=2, **experts
        ),
    }


class Block(nn.Module):
    """A layer of Llama."""

    def __init__(self, width: int, attention: nn.Module):
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 11 * width // 4, bias=False) for _ in range(2))
        self.down = nn.Linear(11 * width // 4, width, bias=False)

    def forward(self, x: Tensor, cache: Any) -> Tensor:
        x = x + self.attention(self.norms[0](x), causal=True, cache=cache)
        y = self.norms[1](x)
        result: Tensor = x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return result


class Decoder(nn.Module):
    """Token ids [B, T] and a cache for each layer → logits [B, T, symbols]."""

    def __init__(self, symbols: int, width: int, attention: Callable[[], nn.Module]):
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.blocks = nn.ModuleList(Block(width, attention()) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)

    def forward(self, tokens: Tensor, caches: list[Any]) -> Tensor:
        x = self.embed(tokens)
        for block, cache in zip(self.blocks, caches):
            x = block(x, cache)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Generation:
    """A prompt that is read, and steps behind it; a call goes back to the prompt and takes all steps."""

    def __init__(self, step: Step, back: Callable[[], None], tokens: Tensor, graphs: bool):
        self.step = step
        self.back = back
        self.tokens = tokens
        self.graphs = graphs

    @torch.no_grad()
    def one(self) -> None:
        """One step."""
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        self.tokens = self.step(self.tokens)[:, -1:].argmax(-1)

    def __call__(self) -> None:
        self.back()
        for _ in range(STEPS):
            self.one()


def compiled(call: Callable[..., Any], args: argparse.Namespace) -> Callable[..., Any]:
    """The call as one graph; on a GPU a CUDA graph."""
    if args.device == "cuda":
        return torch.compile(call, fullgraph=True, mode="reduce-overhead")
    return torch.compile(call, fullgraph=True, backend="aot_eager" if args.miniature else "inductor")


@torch.no_grad()
def of_layers(attention: Callable[[], nn.Module], prompt: Tensor, way: str, args: Any) -> Generation:
    """A decoder of layers here."""
    model = Decoder(SYMBOLS[args.miniature], WIDTH[args.miniature], attention)
    model = model.to(args.device, args.torch_dtype).eval()
    sizes = {"batch": len(prompt), "max_length": PROMPT + STEPS} if way != "growing" else {}
    caches = [block.attention.new_cache(**sizes) for block in model.blocks]
    tokens = model(prompt, caches)[:, -1:].argmax(-1)
    call = compiled(model, args) if way == "compiled" else model

    def back() -> None:
        for cache in caches:
            cache.trim(min(PROMPT, int(cache.length)))

    return Generation(lambda tokens: call(tokens, caches), back, tokens, args.device == "cuda")


@torch.no_grad()
def of_transformers(prompt: Tensor, way: str, args: Any) -> Generation:
    """transformers' Llama of the dense decoder's size, with its own caches."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        vocab_size=SYMBOLS[args.miniature],
        hidden_size=WIDTH[args.miniature],
        intermediate_size=11 * WIDTH[args.miniature] // 4,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=PROMPT + STEPS,
    )
    model = LlamaForCausalLM(config).to(args.device, args.torch_dtype).eval()
    if way == "growing":
        cache = DynamicCache(config=config)
    else:
        cache = StaticCache(config=config, max_cache_len=PROMPT + STEPS)
    tokens = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
    call = compiled(model, args) if way == "compiled" else model

    def back() -> None:
        if surplus := int(cache.get_seq_length()) - PROMPT:
            cache.crop(-surplus)

    return Generation(
        lambda tokens: call(tokens, past_key_values=cache).logits, back, tokens, args.device == "cuda"
    )


def generations(prompt: Tensor, args: argparse.Namespace) -> dict[str, Callable[[], Generation]]:
    """How to make each: "MoA, growing", …"""
    ways = ("growing",) if args.before else ("growing", "static", "compiled")
    made: dict[str, Callable[[], Generation]] = {}
    for name, attention in attentions(WIDTH[args.miniature]).items():
        if args.before and name == "MoA, settings":
            continue
        for way in ways:
            made[f"{name}, {way}"] = lambda a=attention, w=way: of_layers(a, prompt, w, args)
    if args.llama:
        for way in ways:
            made[f"Llama, {way}"] = lambda w=way: of_transformers(prompt, w, args)
    return made


def main() -> None:
    args = arguments(
        __doc__,
        more={
            "--calls": {"action": "store_true", "help": "count Python calls, and take no time"},
            "--before": {"metavar": "COMMIT", "help": "these calls are an older commit's: keep them"},
        },
    )
    try:
        import transformers

        args.llama = f"transformers {transformers.__version__}"
    except ImportError:
        args.llama = ""
        print("Llama: transformers is not installed here")
    calls: dict[str, int] = {}
    seconds: dict[int, dict[str, float]] = {}
    for texts in (1,) if args.calls else TEXTS[args.device]:
        torch.compiler.reset()
        prompt = torch.randint(SYMBOLS[args.miniature], (texts, PROMPT), device=args.device)
        made = {name: make() for name, make in generations(prompt, args).items()}
        for name, generation in made.items() if texts == 1 else ():
            generation.one()
            calls[name] = python_calls(generation.one)
            print(f"{name:24s} {calls[name]:5d} Python calls per step", flush=True)
        if not args.calls:
            times = take_turns(made, args.rounds, args.device)
            seconds[texts] = {name: found / STEPS for name, found in times.items()}
            for name, found in seconds[texts].items():
                print(f"{texts:3d} {name:24s} {1000 * found:8.3f} ms per step", flush=True)
        write(args, calls, seconds)


def write(args: argparse.Namespace, calls: dict[str, int], seconds: dict[int, dict[str, float]]) -> None:
    """The record; with --before or --calls what it has of this code's calls or of seconds stays."""
    path: Path = args.output / f"decoding_step-{args.stem}.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if args.before:
        record["before"] = {"commit": args.before, "python_calls": calls}
    else:
        record |= {
            "benchmark": "decoding_step",
            "hardware": detect_hardware().describe(),
            "threads": torch.get_num_threads(),
            "dtype": args.dtype,
            "rounds": args.rounds,
            "auto": args.auto,
            "llama": args.llama or "not run: transformers is not installed",
            "layers": LAYERS,
            **args.made_by,
            "python_calls": calls,
        }
        if seconds:
            record["seconds_per_step"] = seconds
    args.output.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as stream:
        json.dump(record, stream, indent=1)
        stream.write("\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
