"""Text between files and models: Moses' rules, line functions, segmentation."""
