"""Draft sources: what proposes the continuations of a step. One file each.

May import :mod:`gsd_kernels_hf.validate` and :mod:`gsd_kernels_hf.model`.
"""
