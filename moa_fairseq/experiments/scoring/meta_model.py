"""Builds any registered architecture without data and without memory for its weights."""

import argparse
import contextlib
import functools
import io
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.models import (
    ARCH_MODEL_REGISTRY,
    BaseFairseqModel,
    FairseqEncoderDecoderModel,
    FairseqLanguageModel,
)
from fairseq.models.roberta import model as fairseq_roberta
from torch.overrides import TorchFunctionMode

import moa_fairseq  # noqa: F401  (registers the architectures)
from moa_fairseq.errors import UserError, did_you_mean
from moa_fairseq.plugin import masked_lm

EMBEDDINGS = {
    "shared": ["--share-all-embeddings"],
    "decoder": ["--share-decoder-input-output-embed"],
    "separate": [],
}


def task_of(arch: str) -> str:
    """The fairseq task that trains an architecture: translation, language_modeling or masked_lm.

    Args:
        arch: the name of the architecture for --arch.

    Raises:
        UserError: for a name that no model registered.
    """
    model = ARCH_MODEL_REGISTRY.get(arch)
    if model is None:
        raise UserError(
            f"--arch {arch}: no such architecture{did_you_mean(arch, ARCH_MODEL_REGISTRY)}."
        )
    if issubclass(model, FairseqEncoderDecoderModel):
        return "translation"
    if issubclass(model, FairseqLanguageModel):
        return "language_modeling"
    return "masked_lm"


def build_meta_model(
    arch: str,
    vocab_size: int,
    embeddings: str = "shared",
    model_flags: Sequence[str] = (),
    weights: bool = False,
) -> BaseFairseqModel:
    """The model that fairseq-train would build, on the meta device: shapes, but no weights.

    If an initialisation copies values, which the meta device cannot do, the model is on the CPU with weights.

    Args:
        arch: the name of the architecture for --arch.
        vocab_size: the number of symbols of the (joined) dictionary, including its four special ones.
        embeddings: a key of EMBEDDINGS, which only translation models need.
        model_flags: further flags of fairseq, such as ["--encoder-layers", "3"].
        weights: whether the model is on the CPU, with initialised weights.

    Raises:
        UserError: for an unknown architecture, for flags that fairseq does not have, and for a combination
            that the model refuses.
    """
    task_name = task_of(arch)
    dictionary = dictionary_of(vocab_size)
    special = dictionary.nspecial
    if vocab_size <= special:
        raise UserError(
            f"--vocab-size {vocab_size}: a fairseq dictionary holds {special} special symbols before the "
            f"first word; give the number of lines of dict.txt plus {special}."
        )
    flags = ["no-data", "--arch", arch, "--task", task_name, *model_flags]
    if task_name == "translation":
        flags += EMBEDDINGS[embeddings]
    args = parse_training_flags(flags, "fairseq does not accept these model flags")
    task = SimpleNamespace(
        source_dictionary=dictionary,
        target_dictionary=dictionary,
        dictionary=dictionary,
        output_dictionary=dictionary,
        args=args,
    )
    try:
        with quiet():
            model = None if weights else _on_meta_device(args, task)
            if model is None:
                model = ARCH_MODEL_REGISTRY[args.arch].build_model(args, task)
            return model
    # Some models of fairseq need special data or packages, without which they raise such errors
    except (ValueError, AssertionError, AttributeError, NameError, ImportError) as error:
        setting = " ".join(model_flags) or f"a vocabulary of {vocab_size}"
        reason = str(error) or type(error).__name__
        raise UserError(f"fairseq cannot build {arch} with {setting}: {reason}") from error


def _on_meta_device(args: argparse.Namespace, task: SimpleNamespace) -> BaseFairseqModel | None:
    """The model without weights; None if its initialisation copies values."""
    build = ARCH_MODEL_REGISTRY[args.arch].build_model
    try:
        with torch.device("meta"), _WithoutValues(), _without_bert_initialisation():
            return build(args, task)
    except NotImplementedError:
        return None


class _WithoutValues(TorchFunctionMode):
    """Skips functions that only fill tensors on the meta device, where torch is slow at this."""

    FILLING = frozenset({"constant_", "fill_", "mul_", "normal_", "uniform_", "zero_"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.FILLING:
            # The first argument of torch.nn.init's functions is called `tensor`
            tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextlib.contextmanager
def _without_bert_initialisation() -> Iterator[None]:
    """Skip RoBERTa's initialisation: it copies weights from the CPU, which the meta device cannot do."""
    modules: tuple[Any, ...] = (fairseq_roberta, masked_lm)
    real = fairseq_roberta.init_bert_params
    for module in modules:
        module.init_bert_params = lambda weights: None
    try:
        yield
    finally:
        for module in modules:
            module.init_bert_params = real


def parse_training_flags(
    flags: list[str], refusal: str, parser: argparse.ArgumentParser | None = None
) -> argparse.Namespace:
    """The flags of fairseq-train as fairseq parses them, with the architecture's values.

    Args:
        flags: the words of a command line, the data folder first.
        refusal: the beginning of the error's message; fairseq's own message follows it.
        parser: the parser of another program (None: that of fairseq-train); the flags of the task, the model
            and the criterion are added to it.

    Raises:
        UserError: if fairseq refuses the flags.
    """
    complaint = io.StringIO()
    parser = parser or options.get_training_parser()
    # fairseq looks for --user-dir in sys.argv while it builds the parser
    argv = sys.argv
    sys.argv = ["fairseq-train"]
    try:
        with quiet(), contextlib.redirect_stderr(complaint):
            return options.parse_args_and_arch(parser, flags)
    except SystemExit as error:
        reason = _reason(complaint.getvalue(), parser)
        raise UserError(f"{refusal}: {reason}") from error
    except (ValueError, KeyError, AssertionError) as error:  # fairseq's checks of flags
        raise UserError(f"{refusal}: {error}") from error
    finally:
        sys.argv = argv


def _reason(complaint: str, parser: argparse.ArgumentParser) -> str:
    """What is wrong with the flags, by the parser's complaint, and the flags that were perhaps meant."""
    # Hundreds of lines of usage come before the last line
    lines = complaint.strip().splitlines() or ["unknown flag"]
    reason = lines[-1].split("error: ")[-1]
    reason = re.sub(r"\(choose from (.{200}).*\)", r"(choose from \1 ...)", reason)
    _, _, unknown = reason.partition("unrecognized arguments: ")
    for word in unknown.split():
        if word.startswith("--"):
            reason += did_you_mean(word, parser._option_string_actions)
    return reason


@functools.lru_cache(maxsize=8)
def dictionary_of(symbols: int) -> Dictionary:
    """A dictionary for models without data, shared by all callers, who must not change it.

    Args:
        symbols: the number of its symbols, including fairseq's special ones.
    """
    dictionary = Dictionary()
    for index in range(symbols - len(dictionary)):
        dictionary.add_symbol(f"symbol{index}")
    return dictionary


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside the block, messages at INFO are not logged: constructors of models write many of them."""
    earlier = logging.root.manager.disable
    logging.disable(max(earlier, logging.INFO))
    try:
        yield
    finally:
        logging.disable(earlier)
