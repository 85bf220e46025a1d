"""Seconds of a step on this machine: a prior, a model that every step corrects, and what is kept of it.

Knows row counts, cached tokens and names of shapes; nothing of choices. May import :mod:`gsd_kernels_hf.sources` and
what that may.
"""
