"""What the CPU's process keeps."""

import os
import subprocess
import sys

import pytest


@pytest.mark.thorough
@pytest.mark.parametrize("said, kept", [(None, "16384"), ("7", "7")])
def test_onednn_keeps_the_kernels_of_a_training(said, kept):
    """Before anything is multiplied, and not against what the user has said."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("ONEDNN_")
    }
    environment |= {"CUDA_VISIBLE_DEVICES": ""} | (
        {} if said is None else {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": said}
    )
    code = (
        "import os, moa_fairseq; moa_fairseq.register(); "
        "print(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [kept]
