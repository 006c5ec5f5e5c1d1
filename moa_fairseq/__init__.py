"""moa_fairseq: mixtures of attention heads as a fairseq user-dir. Importing it registers everything.

fairseq imports `tasks/` and `models/` of a user-dir by itself, but only if nobody imported the package
before, and it never imports criterions: so all of it is imported here.
"""

from moa_fairseq import fairseq_compat  # isort: skip  (first: it prepares fairseq and torch)
import torch

from moa_fairseq import criterions, host_memory, models, tasks

__all__ = ["criterions", "fairseq_compat", "models", "tasks"]
__version__ = "0.1.0"

fairseq_compat.install()
if not torch.cuda.is_available():
    host_memory.keep_freed_memory()
