"""The shape of the next step: what steps cost, what has been accepted, and the choice between shapes.

May import :mod:`gsd_kernels_hf.sources` and what that may.
"""
