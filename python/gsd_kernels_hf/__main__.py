"""``python -m gsd_kernels_hf`` is ``gsd-kernels``, whose package is not imported but looked up by name."""

from pkgutil import resolve_name

resolve_name("gsd_kernels_cli.app:main")()
