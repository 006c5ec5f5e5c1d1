"""Models of any job, built from the flags of fairseq-train, and batches for them."""

from types import SimpleNamespace

import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY

from moa_fairseq.experiments.scoring.meta_model import parse_training_flags, quiet, task_of

SYMBOLS = 40
PAD = 1


def dictionary(letter="w", symbols=SYMBOLS):
    words = Dictionary()
    for i in range(symbols - len(words)):
        words.add_symbol(f"{letter}{i}")
    return words


def settings(arch, *flags):
    line = ["data", "--arch", arch, "--task", task_of(arch), *map(str, flags)]
    return parse_training_flags(line, "refused")


def build(arch, *flags, args=None, seed=3, symbols=SYMBOLS, target="w"):
    """A new model; args: its settings instead of the flags'; target: the letter of the target's words."""
    args = args or settings(arch, *flags)
    names = ("source_dictionary", "dictionary", "output_dictionary")
    task = SimpleNamespace(**dict.fromkeys(names, dictionary(symbols=symbols)), args=args)
    task.target_dictionary = dictionary(target, symbols)
    torch.manual_seed(seed)
    with quiet():
        return ARCH_MODEL_REGISTRY[arch].build_model(args, task)


def batch(arch, lengths=(7, 4, 6)):
    """What the model's forward takes: right-padded tokens, for translation a source of other lengths too."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.full((len(lengths), max(lengths)), PAD)
    for row, length in zip(tokens, lengths):
        row[:length] = torch.randint(4, SYMBOLS, (length,), generator=g)
    if task_of(arch) != "translation":
        return {"src_tokens": tokens}
    source = torch.randint(4, SYMBOLS, (len(lengths), 5), generator=g)
    source[0, :2] = PAD
    return {
        "src_tokens": source,
        "src_lengths": source.ne(PAD).sum(1),
        "prev_output_tokens": tokens,
    }


def assert_incremental_equals_full(model, arch):
    """Step by step, in another order of the sentences after each step, as a beam search does it."""
    inputs = batch(arch, (6, 6, 6))
    encoder_out = None
    if "prev_output_tokens" in inputs:
        encoder_out = model.encoder(inputs["src_tokens"], inputs["src_lengths"])
        tokens = inputs["prev_output_tokens"]
    else:
        tokens = inputs["src_tokens"]
    full, _ = model.decoder(tokens, encoder_out=encoder_out)
    order = torch.arange(3)
    turn = torch.tensor([1, 2, 0])
    state = {}
    for step in range(1, 7):
        now, _ = model.decoder(
            tokens[order, :step], encoder_out=encoder_out, incremental_state=state
        )
        torch.testing.assert_close(now[:, 0], full[order, step - 1], rtol=1e-4, atol=1e-4)
        order = order[turn]
        model.decoder.reorder_incremental_state_scripting(state, turn)
        if encoder_out is not None:
            encoder_out = model.encoder.reorder_encoder_out(encoder_out, turn)
