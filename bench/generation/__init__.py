"""Whole generations: the race of all decoders, and tables by shape, source and criterion.

Imports ``kernels`` and ``lib``.
"""
