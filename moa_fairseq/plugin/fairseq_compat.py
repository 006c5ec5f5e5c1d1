"""The one place that knows fairseq's versions: `PATCHES` is the table of all that is changed in fairseq.

Each thing changed is broken or unsafe with today's Python, torch and NumPy, or lacks a hook. `install()` runs
when the plugin is imported.
"""

import functools
import sys

try:
    from moa_fairseq.plugin.patches import (
        adaptive_loss,
        batches,
        best_value,
        checkpoint_reading,
        checkpoint_writing,
        collectives,
        compile_flag,
        compiled_layers,
        cpu_autocast,
        foreign_settings,
        generation,
        half_precision,
        host_tokens,
        kernel_check,
        lengths,
        literals,
        malformed_checkpoints,
        pieces,
        resumption,
        save_on_sigterm,
        saved_numbers,
        table,
        training,
        user_errors,
    )
except ImportError as error:
    raise ImportError(
        f"moa_fairseq is a plugin of fairseq, which cannot be imported ({error}). `bash scripts/setup.sh` "
        "installs one that runs on Python 3.11 and 3.12 (PyPI's own fairseq 0.12.2 does not); this is Python "
        f"{sys.version_info.major}.{sys.version_info.minor}."
    ) from error

load_checkpoint = checkpoint_reading.load_checkpoint

# Of two changes to one function the later one is the outer one.
_IN_ORDER = (
    *(literals, foreign_settings, checkpoint_reading, checkpoint_writing, collectives),
    *(cpu_autocast, batches, saved_numbers, lengths, half_precision),
    *(training, best_value, resumption, user_errors),
    *(adaptive_loss, malformed_checkpoints, save_on_sigterm, generation),
    *(kernel_check, host_tokens, compile_flag, compiled_layers, pieces),
)
PATCHES = tuple(
    row for module in _IN_ORDER for row in table.ROWS if row.change.__module__ == module.__name__
)


@functools.cache
def install() -> None:
    """Prepare fairseq, once per process."""
    for row in PATCHES:
        row.install()
