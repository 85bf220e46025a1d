"""Hugging Face bindings of gsd_kernels (private)."""
