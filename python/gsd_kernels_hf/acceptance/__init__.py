"""Acceptance of drafted tokens: criteria, processors and sampling, and the token-by-token verification.

May import :mod:`gsd_kernels_hf.sources` and what that may.
"""
