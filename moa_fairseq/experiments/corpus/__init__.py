"""The embedded default corpus: English-German pairs from the message catalogues of Python wheels."""
