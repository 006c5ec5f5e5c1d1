"""One step of a small Llama whose attention is each family's: Python calls, and seconds.

    python benchmarks/decoding_step.py --calls         only the Python calls, which any CPU counts
    python benchmarks/decoding_step.py                 also seconds; on a GPU compiled steps are CUDA graphs
    python benchmarks/decoding_step.py --calls --before NAME   save the calls as an older commit's

Six layers read a prompt; then each step gives one token per text. growing, static: eager, with that cache;
compiled: the whole decoder by torch.compile (mode "reduce-overhead" on a GPU), with the static cache. Llama
is that of transformers, where it is installed.
"""

import argparse
import copy
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _bench import arguments, take_turns
from host import python_calls
from torch import Tensor, nn

from moa_fairseq import layers
from moa_fairseq.experiments.recipes.hardware import detect_hardware
from moa_fairseq.files import atomic_write

HEADS = 8
# by --miniature
SIZES = {
    False: SimpleNamespace(layers=6, width=512, symbols=32000, prompt=32, steps=64),
    True: SimpleNamespace(layers=2, width=32, symbols=50, prompt=4, steps=4),
}
TEXTS = {"cpu": (1, 8), "cuda": (1, 32)}
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

    def __init__(self, sizes: SimpleNamespace, attention: Callable[[], nn.Module]):
        super().__init__()
        self.embed = nn.Embedding(sizes.symbols, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes.width, attention()) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.symbols, bias=False)

    def forward(self, tokens: Tensor, caches: list[Any]) -> Tensor:
        x = self.embed(tokens)
        for block, cache in zip(self.blocks, caches):
            x = block(x, cache)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Generation:
    """A prompt that is read, and steps behind it; a call goes back to the prompt and takes all steps."""

    def __init__(
        self, step: Step, back: Callable[[], None], tokens: Tensor, args: argparse.Namespace
    ):
        self.step = step
        self.back = back
        self.tokens = tokens
        self.steps = args.sizes.steps
        self.graphs = args.device == "cuda"

    @torch.no_grad()
    def one(self) -> None:
        """One step."""
        if self.graphs:
            torch.compiler.cudagraph_mark_step_begin()
        self.tokens = self.step(self.tokens)[:, -1:].argmax(-1)

    def __call__(self) -> None:
        self.back()
        for _ in range(self.steps):
            self.one()


def compiled(call: Callable[..., Any], args: argparse.Namespace) -> Callable[..., Any]:
    """The call as one graph; on a GPU a CUDA graph."""
    if args.device == "cuda":
        return torch.compile(call, fullgraph=True, mode="reduce-overhead")
    return torch.compile(
        call, fullgraph=True, backend="aot_eager" if args.miniature else "inductor"
    )


@torch.no_grad()
def of_layers(
    attention: Callable[[], nn.Module], prompt: Tensor, way: str, args: Any
) -> Generation:
    """A decoder of layers here."""
    length = args.sizes.prompt
    model = Decoder(args.sizes, attention).to(args.device, args.torch_dtype).eval()
    sizes = (
        {"batch": len(prompt), "max_length": length + args.sizes.steps} if way != "growing" else {}
    )
    caches = [block.attention.new_cache(**sizes) for block in model.blocks]
    tokens = model(prompt, caches)[:, -1:].argmax(-1)
    call = compiled(model, args) if way == "compiled" else model

    of_prompt = copy.deepcopy(caches)

    def back() -> None:
        if way == "growing":  # with a window it has dropped positions of the prompt meanwhile
            caches[:] = copy.deepcopy(of_prompt)
            return
        for cache in caches:
            cache.trim(min(length, int(cache.length)))

    return Generation(lambda tokens: call(tokens, caches), back, tokens, args)


@torch.no_grad()
def of_transformers(prompt: Tensor, way: str, args: Any) -> Generation:
    """transformers' Llama of the dense decoder's size, with its own caches."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

    sizes = args.sizes
    config = LlamaConfig(
        vocab_size=sizes.symbols,
        hidden_size=sizes.width,
        intermediate_size=11 * sizes.width // 4,
        num_hidden_layers=sizes.layers,
        num_attention_heads=HEADS,
        max_position_embeddings=sizes.prompt + sizes.steps,
    )
    model = LlamaForCausalLM(config).to(args.device, args.torch_dtype).eval()
    if way == "growing":
        cache = DynamicCache(config=config)
    else:
        cache = StaticCache(config=config, max_cache_len=sizes.prompt + sizes.steps)
    keyword = (
        "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    )
    tokens = model(prompt, **{keyword: cache}).logits[:, -1:].argmax(-1)
    call = compiled(model, args) if way == "compiled" else model

    def back() -> None:
        if surplus := int(cache.get_seq_length()) - sizes.prompt:
            cache.crop(-surplus)

    return Generation(lambda tokens: call(tokens, **{keyword: cache}).logits, back, tokens, args)


def generations(prompt: Tensor, args: argparse.Namespace) -> dict[str, Callable[[], Generation]]:
    """How to make each: "MoA, growing", …"""
    ways = ("growing",) if args.before else ("growing", "static", "compiled")
    made: dict[str, Callable[[], Generation]] = {}
    for name, attention in attentions(args.sizes.width).items():
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
            "--before": {
                "metavar": "COMMIT",
                "help": "save these calls under the name of an older commit",
            },
        },
    )
    args.sizes = SIZES[args.miniature]
    try:
        import transformers
        from transformers import LlamaForCausalLM  # noqa: F401 (which loads its libraries)

        args.llama = f"transformers {transformers.__version__}"
    except ImportError as error:
        args.llama = ""
        print(f"Llama: not run, because transformers cannot be imported here ({error})")
    calls: dict[str, int] = {}
    seconds: dict[int, dict[str, float]] = {}
    for texts in (1,) if args.calls or args.miniature else TEXTS[args.device]:
        torch.compiler.reset()
        prompt = torch.randint(args.sizes.symbols, (texts, args.sizes.prompt), device=args.device)
        made = {name: make() for name, make in generations(prompt, args).items()}
        for name, generation in made.items() if texts == 1 else ():
            generation.one()
            calls[name] = python_calls(generation.one)
            print(f"{name:24s} {calls[name]:5d} Python calls per step", flush=True)
        if not args.calls:
            times = take_turns(made, args.rounds, args.device)
            seconds[texts] = {name: found / args.sizes.steps for name, found in times.items()}
            for name, found in seconds[texts].items():
                print(f"{texts:3d} {name:24s} {1000 * found:8.3f} ms per step", flush=True)
        write(args, calls, seconds)


def write(
    args: argparse.Namespace, calls: dict[str, int], seconds: dict[int, dict[str, float]]
) -> None:
    """The record; with --before or --calls what it has of this code's calls or of seconds stays."""
    path: Path = args.output / f"decoding_step-{args.stem}.json"
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if args.before:
        record["before"] = {"commit": args.before, "python_calls": calls}
    else:
        record |= {
            "benchmark": "decoding_step",
            "command": " ".join(["python", "benchmarks/decoding_step.py", *sys.argv[1:]]),
            "hardware": detect_hardware().describe(),
            "threads": torch.get_num_threads(),
            "dtype": args.dtype,
            "rounds": args.rounds,
            "auto": args.auto,
            "llama": args.llama or "not run: transformers cannot be imported",
            "layers": args.sizes.layers,
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
