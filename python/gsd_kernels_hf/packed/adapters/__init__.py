"""Weights that a library loaded quantised, read as packed matrices: a file a library."""
