"""What a training on the CPU keeps in memory instead of asking anew: freed blocks, compiled kernels."""

import ctypes
import os
import sys

# mallopt's names, from malloc.h
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
_NEVER = 2**31 - 1
_GROWTH = 64 * 2**20  # bytes

# oneDNN compiles a kernel for each shape of a bfloat16 product and keeps 1,024 of them. Batches differ in
# length and experts in their number of rows, so a training has more shapes and would never stop compiling.
_KERNELS = 16_384


def keep_freed_memory() -> bool:
    """Let the C library keep freed blocks for the next tensor instead of returning them to the kernel.

    A training step allocates and frees the same large tensors over and over. glibc maps each one anew,
    and the kernel zeroes every page at first touch: on a CPU that can take as long as the arithmetic.
    The resident size stays at the step's peak.

    Returns:
        Whether the C library has taken the settings; False where it is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):  # another C library
        return False
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _GROWTH))
    return all(mallopt(name, value) for name, value in settings)


def keep_compiled_kernels() -> None:
    """Let oneDNN keep a training's kernels; ONEDNN_PRIMITIVE_CACHE_CAPACITY, where it is set, says how many.

    To be called before the first product in bfloat16: oneDNN looks once.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KERNELS))
