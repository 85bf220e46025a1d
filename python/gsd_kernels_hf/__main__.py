"""``python -m gsd_kernels_hf`` is ``gsd-kernels``."""

from .cli import main

main()
