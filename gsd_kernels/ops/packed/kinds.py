"""The formats of packed weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A format of packed weights: rows of blocks, one after the other.

    Attributes:
        name: as GGUF writes it, in lower case. Kinds whose scales lie beside the rows have names of their own: codes of
            a byte, or of half a byte, the first weight of a byte in its low half (in its high half: nf4 and fp4).
        number: its place in the list of ``csrc/algorithms/weight_formats.h``, from 3 on.
        weights: of a block.
        bytes: of a block.
        beside: float32 numbers that lie beside the rows for a group of inputs: none; a scale; a scale and what is
            taken from the codes (``uint8``, ``int4``: an integer) or added at the end (``int4_offset``).
        halves: bytes of a block at which its float16 numbers begin; where it has blocks of 32 or 256.
        signed: codes of a byte have a sign, and lie in int8.
        high_first: the first weight of a byte is that in its high half.
    """

    name: str
    number: int
    weights: int
    bytes: int
    beside: int = 0
    halves: tuple[int, ...] = (0,)
    signed: bool = False
    high_first: bool = False

    @property
    def bits(self) -> float:
        """Bits a weight, scales within blocks included, those beside the rows not."""
        return 8 * self.bytes / self.weights

    def row_bytes(self, inputs: int) -> int:
        """Bytes of a row of ``inputs`` weights.

        Raises:
            ValueError: they are no whole number of blocks.
        """
        if inputs <= 0 or inputs % self.weights:
            raise ValueError(f"inputs: {self.name} packs {self.weights} weights a block, got rows of {inputs}")
        return inputs // self.weights * self.bytes


KINDS = (
    Kind("q4_0", 3, 32, 18),
    Kind("q4_1", 4, 32, 20, halves=(0, 2)),
    Kind("q5_0", 5, 32, 22),
    Kind("q5_1", 6, 32, 24, halves=(0, 2)),
    Kind("q8_0", 7, 32, 34),
    Kind("iq4_nl", 8, 32, 18),
    Kind("mxfp4", 9, 32, 17, halves=()),
    Kind("q4_k", 10, 256, 144, halves=(0, 2)),
    Kind("q5_k", 11, 256, 176, halves=(0, 2)),
    Kind("q6_k", 12, 256, 210, halves=(208,)),
    Kind("int8", 13, 1, 1, beside=1, signed=True),
    Kind("uint8", 14, 1, 1, beside=2),
    Kind("int4", 15, 2, 1, beside=2),
    Kind("int4_offset", 16, 2, 1, beside=2),
    Kind("nf4", 17, 2, 1, beside=1, high_first=True),
    Kind("fp4", 18, 2, 1, beside=1, high_first=True),
)
"""Those that stand for a dense matrix: it is what rows are multiplied with, whatever the kind."""
CODE_KINDS = (
    Kind("int8_dynamic", 19, 1, 1, beside=1, signed=True),
    Kind("int8_vectorwise", 21, 1, 1, beside=1, signed=True),
)
"""Those that are multiplied with rows of codes, see :mod:`.codes`: as ``int8``, but a product is not that of the dense
matrix. The number beside a row of ``int8_vectorwise`` is the magnitude that a code of 127 stands for."""
ROUNDED_KINDS = (Kind("int8_rounded", 20, 1, 1, beside=1, signed=True),)
"""Those that stand for a dense matrix, and are multiplied with rows that are rounded first, see :mod:`.codes`."""
ROUNDING_KINDS = (*CODE_KINDS, *ROUNDED_KINDS)
"""Those of both: rows are rounded to eight bits before they are multiplied."""
BY_NAME = {k.name: k for k in (*KINDS, *ROUNDING_KINDS)}
