"""Studies: the same training for several systems and seeds, and what their differences allow to say."""
