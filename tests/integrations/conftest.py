"""torchvision of the package index is built for CUDA: beside a torch without it, its operators are not there."""

import importlib.util

import torch

if importlib.util.find_spec("torchvision"):
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        operators = torch.library.Library("torchvision", "DEF")  # which lives as long as this module
        for name in ("nms", "qnms"):
            operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
