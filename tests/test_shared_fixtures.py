"""What the tests' own fixtures leave out of fairseq's way is the same without it."""

import hydra
from fairseq import options
from fairseq.dataclass import utils
from shared_fixtures import Composer


def test_settings_are_those_that_fairseq_composes(monkeypatch):
    """The second and the third time without hydra: lists, numbers in other types, texts, what is left out."""
    line = (
        "nowhere",
        "--arch",
        "mae_transformer_tiny",
        "--task",
        "translation_bcd",
        "--optimizer",
        "adam",
    )
    line = (*line, "--criterion", "label_smoothed_cross_entropy")
    composer = Composer()
    for more in (
        (
            "--lr",
            "0.5,1",
            "--gate-lr",
            "2",
            "--adam-betas",
            "(0.5, 0.9)",
            "--update-freq",
            "2,1",
        ),
        (
            "--lr",
            "1",
            "--save-dir",
            "a b",
            "--label-smoothing",
            "1",
            "--ddp-backend",
            "no_c10d",
            "--amp",
        ),
        ("--source-lang", "en", "--max-epoch", "3", "--validate-interval-updates", "7"),
    ):
        args = options.parse_args_and_arch(
            options.get_training_parser("translation_bcd"), [*line, *more]
        )
        found = []
        for compose in (composer, hydra.compose):
            monkeypatch.setattr(utils, "compose", compose)
            found.append(utils.convert_namespace_to_omegaconf(args))
        assert found[0] == found[1]
