"""Trainings of tiny language models that read texts chunk by chunk."""

import moa_fairseq

SMALL = ["--decoder-layers", "2", "--decoder-embed-dim", "32", "--decoder-ffn-embed-dim", "48"]


def arguments(data, save_dir, *flags, arch="switchall_lm_tiny"):
    """fairseq-train's, as words."""
    line = [data, "--user-dir", moa_fairseq.__path__[0], "--cpu"]
    line += ["--task", "language_modeling_truncated_bptt", "--arch", arch, *SMALL]
    line += ["--criterion", "cross_entropy_with_routing", "--balance-loss", "entropy"]
    line += [
        "--load-balance-coef",
        0.001,
        "--z-loss-coef",
        0,
        "--tokens-per-sample",
        8,
        "--batch-size",
        6,
    ]
    line += [
        "--batch-size-valid",
        2,
        "--optimizer",
        "adam",
        "--lr",
        0.002,
        "--num-workers",
        0,
        "--seed",
        3,
    ]
    line += ["--log-format", "json", "--log-interval", 5, "--save-dir", save_dir, *flags]
    return [str(word) for word in line]
