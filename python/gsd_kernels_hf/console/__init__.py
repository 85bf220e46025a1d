"""Shared by every command line: output and exit codes, loading a pair, torchrun's processes, versions.

May import everything that decodes, and :mod:`gsd_kernels_hf.demo`; only :mod:`gsd_kernels_hf.cli` and the benchmarks
import it.
"""
