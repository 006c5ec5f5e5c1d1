"""Dense models of the three jobs, trained for a few dozen updates; treat their folders as read-only."""

import pytest

from moa_fairseq.cli import main

SMALL = """--encoder-embed-dim 16 --encoder-ffn-embed-dim 24 --encoder-attention-heads 4
    --decoder-embed-dim 16 --decoder-ffn-embed-dim 24 --decoder-attention-heads 4"""
CAUSAL = """--task language_modeling --arch transformer_lm --decoder-layers 2 --decoder-embed-dim 16
    --decoder-ffn-embed-dim 24 --decoder-attention-heads 4 --tokens-per-sample 24 --max-tokens 240 --cpu
    --optimizer adam --lr 0.01 --max-epoch 2 --num-workers 0 --save-dir"""


@pytest.fixture(scope="session")
def dense(once, fairseq, toy_data, toy_wiki_data, train_masked_lm):
    """dense(job) → (checkpoint, its data)."""

    def train(job, folder):
        if job == "translation":
            fairseq.train(
                toy_data, folder, "--max-epoch", 3, *SMALL.split(), arch="transformer"
            )
        elif job == "masked LM":
            train_masked_lm(
                folder, "--max-epoch", 2, arch="roberta_tiny", criterion="masked_lm"
            )
        else:
            fairseq("train", toy_wiki_data, *CAUSAL.split(), folder)

    def dense(job):
        folder = once(f"dense {job}", lambda folder: train(job, folder))
        return (
            folder / "checkpoint_last.pt",
            toy_data if job == "translation" else toy_wiki_data,
        )

    return dense


@pytest.fixture
def convert(capsys):
    """convert(IN, OUT, *flags) runs the command; returns what it printed, on stderr if it refused."""

    def run(source, target, *flags, status=0):
        assert main(["convert", str(source), str(target), *map(str, flags)]) == status
        printed = capsys.readouterr()
        return printed.err if status else printed.out

    return run
