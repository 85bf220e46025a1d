"""A corpus on disk: building an index of texts, and opening it.

May import :mod:`gsd_kernels_hf.files`.
"""
