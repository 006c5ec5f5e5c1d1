"""What a training on the CPU keeps in memory for later steps: freed blocks and compiled kernels."""

import ctypes
import os
import sys

# Parameters of mallopt, from malloc.h
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_MAX = -4
_NEVER = 2**31 - 1
_GROWTH = 64 * 2**20  # bytes by which the heap grows at least

# oneDNN compiles a kernel for each shape of a bfloat16 product and keeps 1,024 of them. Batches differ in
# length and experts in their number of rows, so a training has more shapes and would never stop compiling.
_KERNELS = 16_384


def keep_freed_memory() -> bool:
    """Let the C library keep freed blocks for the next tensor instead of returning them to the kernel.

    Every training step allocates and frees the same large tensors. glibc maps each of them again, and the
    kernel zeroes every page at first touch: on a CPU that can take as long as the arithmetic. The resident
    size stays at the peak of a step.

    Returns:
        Whether the C library has accepted the settings; False if it is not glibc.
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
    """Let oneDNN keep a training's kernels, unless ONEDNN_PRIMITIVE_CACHE_CAPACITY already sets their number.

    This must be called before the first product in bfloat16: oneDNN reads the variable once.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_KERNELS))
