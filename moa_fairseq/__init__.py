"""moa_fairseq: mixtures of attention heads as a fairseq user-dir.

`moa_fairseq.layers` needs torch alone, and importing it changes nothing else.
Where fairseq is imported already, as by `--user-dir`, importing the package registers everything; else
`register` does.
"""

import functools
import importlib.util
import logging
import sys
import warnings

__version__ = "0.1.0"
# How torch 2.14 warns of what fairseq does when it is imported: no user can change that.
JIT_WARNING = "`torch.jit.script` is deprecated"


@functools.cache
def register() -> None:
    """Prepare fairseq and torch, and register tasks, models and criterions; nothing without fairseq."""
    warnings.filterwarnings("ignore", JIT_WARNING, FutureWarning)
    if importlib.util.find_spec("fairseq") is None:
        return
    root = logging.getLogger()
    level = root.level
    # fairseq imports `tasks/` and `models/` of a user-dir itself, but only if the package was not imported
    # before, and never its criterions. So everything is imported here.
    from moa_fairseq.plugin import fairseq_compat  # isort: skip  (first: it prepares fairseq and torch)
    import torch

    from moa_fairseq.layers.sdpa import switch_off_cudnn
    from moa_fairseq.plugin import criterions, host_memory, models, tasks  # noqa: F401

    root.setLevel(level)  # one of fairseq's modules sets it to DEBUG
    fairseq_compat.install()
    switch_off_cudnn()
    if not torch.cuda.is_available():
        host_memory.keep_freed_memory()
        host_memory.keep_compiled_kernels()


if "fairseq" in sys.modules:
    register()
