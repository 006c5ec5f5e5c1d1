"""What fairseq and torch need today, a subject a file; `fairseq_compat` lists and installs it."""
