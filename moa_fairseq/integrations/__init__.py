"""Mixtures of heads in the models of other libraries. Each module imports its own library."""
