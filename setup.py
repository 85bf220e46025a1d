"""Packages of the one distribution; metadata is in pyproject.toml."""

from __future__ import annotations

from setuptools import find_packages, setup

MAPPED = {"gsd_kernels_hf": "python/gsd_kernels_hf", "gsd_kernels_bench": "bench"}


def packages() -> list[str]:
    names = find_packages(include=["gsd_kernels", "gsd_kernels.*"])
    for name, folder in MAPPED.items():
        names += [name, *(f"{name}.{sub}" for sub in find_packages(folder))]
    return names


setup(packages=packages(), package_dir=MAPPED)
