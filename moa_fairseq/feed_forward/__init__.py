"""Mixtures of experts in place of a Transformer's feed-forward."""
