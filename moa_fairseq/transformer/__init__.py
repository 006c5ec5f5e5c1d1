"""fairseq's Transformers with a mixture of attention heads inside."""
