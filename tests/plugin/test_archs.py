"""Named architectures set what the user has not set."""

import pytest
from fairseq import options

# arch → settings that it has, each of which the user may set to 0
SETTINGS = {
    "moh_transformer_tiny": ["moh_shared_heads", "dropout"],
    "mae_transformer_base": ["gate_dropout", "dropout"],
    "switchall_lm_tiny": ["sigma_moe_num_experts", "dropout", "activation_dropout"],
}


def parse(*words):
    return options.parse_args_and_arch(options.get_training_parser(), ["data", *words])


@pytest.mark.parametrize("arch", SETTINGS)
def test_a_zero_of_the_user_wins(arch):
    flags = []
    for name in SETTINGS[arch]:
        flags += [f"--{name.replace('_', '-')}", "0"]
    default = vars(parse("--arch", arch))
    assert all(default[name] > 0 for name in SETTINGS[arch])
    args = vars(parse("--arch", arch, *flags))
    assert {name: args[name] for name in SETTINGS[arch]} == dict.fromkeys(SETTINGS[arch], 0)
