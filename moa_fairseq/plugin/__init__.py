"""fairseq's side: its Transformers with a mixture of attention heads inside, and all that it registers."""
