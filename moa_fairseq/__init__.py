"""moa_fairseq: mixtures of attention heads as a fairseq user-dir. Importing it registers everything.

Without fairseq nothing is registered, but `moa_fairseq.attention` and `moa_fairseq.kernels` work with torch
alone. `moa-fairseq` registers everything once it knows its verb, so that its help need not wait for torch.
"""

import functools
import importlib.util
import os
import sys

__version__ = "0.1.0"


@functools.cache
def register() -> None:
    """Prepare fairseq and torch, and register tasks, models and criterions; nothing without fairseq."""
    if importlib.util.find_spec("fairseq") is None:
        return
    # fairseq imports `tasks/` and `models/` of a user-dir itself, but only if the package was not imported
    # before, and never its criterions. So everything is imported here.
    from moa_fairseq import fairseq_compat  # isort: skip  (first: it prepares fairseq and torch)
    import torch

    from moa_fairseq import criterions, host_memory, models, tasks  # noqa: F401

    fairseq_compat.install()
    if not torch.cuda.is_available():
        host_memory.keep_freed_memory()
        host_memory.keep_compiled_kernels()


if os.path.basename(sys.argv[0]) != "moa-fairseq" and "moa_fairseq.cli" not in getattr(sys, "orig_argv", ()):
    register()
