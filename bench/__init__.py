"""Benchmarks of gsd_kernels beside their peers (private; ``gsd-kernels bench`` is the way in)."""
