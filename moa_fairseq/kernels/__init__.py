"""Expert-bank backends: one pair of functions (`expert_bank`), interchangeable implementations."""
