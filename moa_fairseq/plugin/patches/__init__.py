"""Changes to fairseq and torch, one file per subject; `fairseq_compat` lists and makes them."""
