"""moa_fairseq: mixtures of attention heads as a fairseq user-dir. Importing it registers everything.

Without fairseq nothing is registered, but `moa_fairseq.attention` and `moa_fairseq.kernels` work with torch
alone.
"""

import importlib.util

__version__ = "0.1.0"

if importlib.util.find_spec("fairseq") is not None:
    # fairseq imports `tasks/` and `models/` of a user-dir itself, but only if the package was not imported
    # before, and never its criterions. So everything is imported here.
    from moa_fairseq import fairseq_compat  # isort: skip  (first: it prepares fairseq and torch)
    import torch

    from moa_fairseq import criterions, host_memory, models, tasks

    __all__ = ["criterions", "fairseq_compat", "models", "tasks"]

    fairseq_compat.install()
    if not torch.cuda.is_available():
        host_memory.keep_freed_memory()
        host_memory.keep_compiled_kernels()
