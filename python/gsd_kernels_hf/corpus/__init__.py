"""A corpus on disk: its files, and opening them.

May import :mod:`gsd_kernels_hf.files`.
"""
