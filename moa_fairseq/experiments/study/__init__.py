"""Studies: the same training for several systems and seeds, and significance tests of their differences."""
