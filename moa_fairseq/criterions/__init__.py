"""fairseq's criterions with the routers' auxiliary losses added."""

from moa_fairseq.criterions import label_smoothed, masked_lm

__all__ = ["label_smoothed", "masked_lm"]
