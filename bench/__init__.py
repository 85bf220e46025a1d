"""Benchmarks of gsd_kernels (private)."""
