"""Optimisation beside fairseq's own."""
