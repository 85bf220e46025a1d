"""One model and its cache: attention of graph rows, the forward of prompt and rows, linear layers on a CPU.

May import :mod:`gsd_kernels`, and nothing else of the bindings.
"""
