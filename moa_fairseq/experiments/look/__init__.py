"""One page of a trained run: which expert took which token, loads, training and result."""
