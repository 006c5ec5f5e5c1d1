"""A family as a user would add one: `--user-dir tests/toy_family --arch parity_transformer_tiny`."""

import moa_fairseq  # noqa: F401  (the rooms below)
from toy_family import models  # noqa: F401
