"""moa_fairseq: mixtures of attention heads as a fairseq user-dir.

`moa_fairseq.layers` needs torch alone, and importing it changes nothing else.
Where fairseq is imported already, as by `--user-dir`, importing the package registers everything; else
`register` does.
"""

import functools
import importlib.util
import logging
import os
import sys
import warnings

from moa_fairseq.files.utf8 import use_utf8

__version__ = "0.1.0"
# How torch 2.14 warns of what fairseq does when it is imported: no user can change that.
JIT_WARNING = "`torch.jit.script` is deprecated"


@functools.cache
def register() -> None:
    """Prepare fairseq and torch, and register tasks, models and criterions; nothing without fairseq."""
    warnings.filterwarnings("ignore", JIT_WARNING, FutureWarning)
    if importlib.util.find_spec("fairseq") is None:
        return
    if _is_program_of_fairseq():
        use_utf8()
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


def _is_program_of_fairseq() -> bool:
    """Whether this is fairseq-train or another, which reads --user-dir before it does anything else.

    fairseq-hydra-train has gone into another folder by then.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    name = spec.name if spec else os.path.basename(sys.argv[0])
    return name.startswith(("fairseq_cli.", "fairseq-")) and "hydra" not in name


if "fairseq" in sys.modules:
    register()
