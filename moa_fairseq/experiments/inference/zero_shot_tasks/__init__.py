"""Task files of lm-evaluation-harness that it lacks itself."""
