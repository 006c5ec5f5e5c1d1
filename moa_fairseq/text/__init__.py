"""Conversion of text between files and models: Moses' rules, functions of a line, segmentation."""
