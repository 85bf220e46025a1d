"""Benchmarks of gsd_kernels beside its peers; ``gsd-kernels bench`` is the way in, :mod:`.cli` the registry.

Rooms: ``kernels`` (ops and one step of them), ``generation`` (whole texts), ``scale`` (several GPUs, long prompts),
``gpu`` (what needs one), and ``lib``, which they share. May import everything but commands; not in the wheel.
"""
