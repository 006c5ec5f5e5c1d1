"""A GPU that is not there, for this process and those it starts: kernels are compiled for Hopper, never run.

`python("-c", …, PYTHONPATH=folder)` with a `sitecustomize.py` that imports this module.
"""

from types import SimpleNamespace

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from moa_fairseq.layers.experts import triton as backend
from moa_fairseq.layers.experts import validate
from moa_fairseq.layers.experts.triton import kernels, tuning, weight_grad


class Driver:
    """What Triton asks its driver for, and launches that do nothing."""

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": tuning.shared_limit((9, 0))},
        load_binary=lambda *_: (1, 1, 32, 0, 1024),
        unload_module=lambda module: None,
    )
    get_current_device = get_current_stream = staticmethod(lambda *_: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_benchmarker = staticmethod(lambda: lambda call, quantiles: call() or [1.0, 1.0, 1.0])
    launcher_cls = staticmethod(lambda source, metadata: lambda *_: None)


driver.set_active(Driver())
backend.takes = lambda rows, weight: True
tuning._limit_of = lambda device: tuning.shared_limit((9, 0))
kernels.product_kernel.configs = kernels.product_kernel.configs[:2]
kernels.gate_kernel.configs = kernels.gate_kernel.configs[:1]
weight_grad.outer_kernel.configs = weight_grad.outer_kernel.configs[:1]
# one shape, named as the one that is tuned, too
validate._SMALL = {"a layer": validate.Sizes(3, 32, 4, 2, 16, 1)}
