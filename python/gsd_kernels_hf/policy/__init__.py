"""The shape of the next step: what has been accepted lately, and the choice between shapes, or between rows of one.

May import :mod:`gsd_kernels_hf.costs` and what that may.
"""
