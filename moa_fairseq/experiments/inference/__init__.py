"""Raw text in, raw text out: a trained run used on text of the user's own."""
