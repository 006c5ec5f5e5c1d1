"""A checkpoint's configuration makes fairseq download nothing from elsewhere, and run and overwrite nothing.

Tokenizers would download what a setting names, embeddings and dictionaries are read from any path, a data set
of FASTA files is counted by a shell command that contains its path, and a criterion opens a file for writing.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Callable
from typing import Any
from urllib.parse import urlparse

from moa_fairseq.errors import UserError
from moa_fairseq.files import refuse_irregular
from moa_fairseq.plugin.patches.table import Proxy, made_of, patch, replaced

# Settings that name output files: a checkpoint that is loaded must not choose where to write.
OUTPUTS = ("save_predictions", "tensorboard_logdir")
_TEST = "plugin/patches/test_planted_checkpoints.py::test_a_planted_checkpoint_does_nothing"
FAIRSEQ_HOST = "dl.fbaipublicfiles.com"  # fairseq's default address of GPT-2's byte-pair encoding


def forget_outputs(state: Any) -> Any:
    """Set the OUTPUTS in a checkpoint's configuration to None, in place, and return the checkpoint."""
    if not isinstance(state, dict):
        return state
    configuration = state.get("cfg")
    groups = configuration.values() if isinstance(configuration, dict) else ()
    for part in (state.get("args"), *groups):
        settings = vars(part) if isinstance(part, argparse.Namespace) else part
        if isinstance(settings, dict):
            for name in settings.keys() & set(OUTPUTS):
                settings[name] = None
    return state


@patch("fairseq.data.encoders.*:file_utils", _TEST, made_of)
class LocalFiles(Proxy):
    """fairseq's file_utils, which downloads from FAIRSEQ_HOST alone.

    A tokenizer downloads its files from any address that a checkpoint names.
    """

    def cached_path(self, name: Any, cache_dir: Any = None) -> str:
        """The path of a file on this machine, or of the copy of a file on FAIRSEQ_HOST.

        Raises:
            UserError: if the address is elsewhere, or the file is not regular.
        """
        address = urlparse(str(name))
        if address.scheme in ("http", "https", "s3") and address.hostname != FAIRSEQ_HOST:
            raise UserError(
                f"The tokenizer needs a download from {name}. The address may come from somebody else's "
                "checkpoint, so nothing was downloaded. If you trust it, download the file yourself, "
                "and name your copy (--bpe-codes FILE, --gpt2-encoder-json FILE and so on)."
            )
        refuse_irregular(str(name), "A tokenizer's file")
        return self._original.cached_path(name, cache_dir)


@patch("fairseq.data.fasta_dataset:FastaDataset._build_index", _TEST)
def quote_the_path(build_index: Callable, dataset: Any, path: str) -> Any:
    """Quote the path of a data set of FASTA files.

    fairseq puts the path of a data set into a shell command without quoting it.
    """
    return build_index(dataset, shlex.quote(path))


@patch("fairseq.*:open", _TEST, replaced)
def open_regular_files(file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
    """`open`, for regular files alone where the file is read.

    A setting can name a pipe as an embedding or dictionary, which hangs, or a device, which fills the memory.

    Raises:
        UserError: if a file to be read is not regular.
    """
    is_descriptor = isinstance(file, int)
    writes = set(mode) & set("wax+")
    if not is_descriptor and not writes and str(file) != os.devnull:
        refuse_irregular(file, "The file")
    return open(file, mode, *args, **options)
