"""The JSON files that commands write, and what made them."""
