"""Lets the tests of this folder, and those that run in processes of their own, share `projection_cases`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
