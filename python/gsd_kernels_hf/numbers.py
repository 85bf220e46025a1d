"""Numbers of a file that anybody may have written: of one kind, finite and within bounds, or an error.

Sections of a :class:`~gsd_kernels_hf.store.Document` are read by these alone, before any of it is taken over.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MAX_COUNT = 1 << 53  # of steps: what a float still tells apart
ROUNDING = 1e-6  # of the largest eigenvalue: what writing seven digits may make of the smallest


def number(name: str, value: Any, least: float, most: float) -> float:
    """A number from ``least`` to ``most``.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not least <= value <= most:
        raise ValueError(f"{name}: expected a number from {least:g} to {most:g}, got {_shown(value)}")
    return float(value)


def count(name: str, value: Any, least: int = 0, most: int = MAX_COUNT) -> int:
    """A whole number from ``least`` to ``most``.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{name}: expected a whole number from {least} to {most}, got {_shown(value)}")
    return value


def flag(name: str, value: Any) -> bool:
    """A truth value.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not bool:
        raise ValueError(f"{name}: expected true or false, got {_shown(value)}")
    return value


def table(name: str, value: Any, kind: type) -> dict[str, Any]:
    """An object of JSON whose values are of a kind.

    Raises:
        ValueError: it is none.
    """
    if type(value) is not dict or not all(type(inner) is kind for inner in value.values()):
        raise ValueError(f"{name}: expected a table of {kind.__name__}, got {_shown(value)}")
    return value


def array(name: str, value: Any, shape: tuple[int | None, ...], least: float, most: float) -> np.ndarray:
    """Numbers from ``least`` to ``most`` as float64, of a shape; ``None``: as many as there are.

    Raises:
        ValueError: they are none.
    """
    try:
        values = np.array(value)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{name}: {error}") from error
    fits = values.ndim == len(shape) and all(n in (None, size) for n, size in zip(shape, values.shape, strict=True))
    if not fits or values.dtype.kind not in "iuf":
        raise ValueError(f"{name}: expected numbers {list(shape)}, got {values.dtype} {list(values.shape)}")
    values = values.astype(float)
    if not ((values >= least) & (values <= most)).all():  # false for nan
        raise ValueError(f"{name}: expected numbers from {least:g} to {most:g}")
    return values


def covariance(name: str, value: Any, most: np.ndarray) -> np.ndarray:
    """A covariance [n, n]: symmetric, positive semi-definite, its variances at most ``most`` [n].

    Raises:
        ValueError: it is none.
    """
    bound = float(most.max())
    matrix = array(name, value, (len(most), len(most)), -bound, bound)
    if not np.allclose(matrix, matrix.T, rtol=1e-5, atol=1e-12):
        raise ValueError(f"{name}: expected a covariance, which is symmetric")
    if (matrix.diagonal() > most).any():
        raise ValueError(f"{name}: expected variances that there can be")
    matrix = (matrix + matrix.T) / 2
    values = np.linalg.eigvalsh(matrix)
    if values[0] < -ROUNDING * values[-1] or values[-1] < 0:
        raise ValueError(f"{name}: expected a covariance, which no combination of values makes negative")
    return matrix + max(-values[0], 0.0) * np.eye(len(matrix))


def _shown(value: Any) -> str:
    """The beginning of a value; of an integer of thousands of digits its size, which is quicker."""
    if type(value) is int and value.bit_length() > 64:
        return f"one of {value.bit_length()} bits"
    text = repr(value) if not isinstance(value, (list, dict)) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:40]}…"
