"""Heads that let a target draft for itself: each guesses a later token from the target's last hidden state.

Blockwise parallel decoding (arXiv 1811.03115) in the form of Medusa (arXiv 2401.10774, section 2.1.1): head k adds a
residual block to the hidden state that the target's own output matrix reads, and goes through that matrix.
``gsd-kernels train-heads`` trains them; the target is not changed.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig

from ..files import path_of, write_file, write_json
from ..model.properties import text_config, vocabulary
from ..packed.modules import device_of_weights
from ..records import Candidates
from .base import Level, Text
from .checkpoints import BadCheckpoint, Checkpoint, bad, check_sizes, fetch, headers, read_json
from .expansion import DraftVocabulary, Lattice, shares_of
from .features import LastState

CONFIG_FILE = "draft_heads.json"
"""The file that marks a folder of heads."""

OPTION = "draft_heads"
"""The option that names heads, unless ``drafter`` does."""

WEIGHTS_FILE = "draft_heads.safetensors"
MEDUSA = re.compile(r"^(medusa_head\.)?\d+\.\d+\.(linear\.)?(weight|bias)$")
"""Names of the tensors of Medusa's heads; a checkpoint may hold the target's beside them."""


class DraftHeads(nn.Module):
    """``num_heads`` residual blocks on one hidden state of the target.

    With h the hidden state at a position, after the final norm, the target itself predicts the next token from
    ``lm_head(h)``. Head k (from 0) predicts the token k + 2 positions on, from ``lm_head(h_k)``:

        h_k = h + SiLU(W_k h + b_k)        (Medusa, arXiv 2401.10774, equation 1; ``num_layers`` such blocks in a row)

    W and b begin as zeros, so that every head begins as the target's own head.

    Args:
        hidden_size: D, of the target.
        num_heads: K, later tokens to guess.
        num_layers: residual blocks of each head.
        output_size: rows of the heads' own output matrices, as Medusa's checkpoints have them; ``None``: the target's.
        target: what the heads were made for (see :func:`shape_of`); checked when they are loaded for a model.

    Raises:
        ValueError: a size that is not positive.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_layers: int = 1,
        output_size: int | None = None,
        target: dict[str, int | str] | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("hidden_size", hidden_size), ("num_heads", num_heads), ("num_layers", num_layers)):
            if type(size) is not int or size < 1:
                raise ValueError(f"{name}: expected a positive integer, got {size!r}")
        self.hidden_size, self.num_heads, self.num_layers = hidden_size, num_heads, num_layers
        self.target = dict(target or {})
        # [layer, head, in, out] and [layer, head, 1, out]
        self.weight = nn.Parameter(torch.zeros(num_layers, num_heads, hidden_size, hidden_size))
        self.bias = nn.Parameter(torch.zeros(num_layers, num_heads, 1, hidden_size))
        self.output_size = output_size
        own = None if output_size is None else nn.Parameter(torch.zeros(num_heads, output_size, hidden_size))
        self.register_parameter("output", own)  # [head, V, in]

    def forward(self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor]) -> Tensor:
        """Logits of every head.

        Args:
            hidden: [B, D], what ``lm_head`` reads at the last position whose next token is known or drawn from it.
            lm_head: the target's output layer, [..., D] → [..., V].

        Returns:
            [B, num_heads, V]; [:, k] are of the token k + 2 positions after that of ``hidden``.

        Raises:
            ValueError: ``hidden`` of another shape.
        """
        if self.output is not None:
            return torch.einsum("bhd,hvd->bhv", self.states(hidden), self.output).to(hidden.dtype)
        return lm_head(self.states(hidden).to(hidden.dtype))

    def states(self, hidden: Tensor) -> Tensor:
        """The states that the output layer reads for every head: [N, D] → [N, num_heads, D], in the heads' dtype.

        Raises:
            ValueError: ``hidden`` of another width.
        """
        if hidden.dim() != 2 or hidden.shape[1] != self.hidden_size:
            raise ValueError(f"hidden: expected [rows, {self.hidden_size}], got shape {list(hidden.shape)}")
        state = hidden.to(self.weight.dtype).expand(self.num_heads, -1, -1)  # [heads, rows, D]
        for weight, bias in zip(self.weight, self.bias, strict=True):
            state = state + F.silu(torch.baddbmm(bias, state, weight))
        return state.transpose(0, 1)

    @classmethod
    def for_model(cls, target: PreTrainedModel, num_heads: int, *, num_layers: int = 1) -> DraftHeads:
        """Untrained heads of ``target``'s size, dtype and device."""
        shape = shape_of(target)
        heads = cls(int(shape["hidden_size"]), num_heads, num_layers=num_layers, target=shape)
        return heads.to(_device(target), target.dtype)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``draft_heads.safetensors`` and ``draft_heads.json`` into ``folder``, which is made if need be."""
        folder = path_of(folder)
        folder.mkdir(parents=True, exist_ok=True)
        settings = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        config = {name: value for name, value in settings.items() if value is not None}
        weights = {name: value.detach().cpu().contiguous() for name, value in self.state_dict().items()}
        write_file(folder / WEIGHTS_FILE, lambda partial: save_file(weights, partial, metadata={"format": "pt"}))
        write_json(folder / CONFIG_FILE, config, indent=2)

    @classmethod
    def from_pretrained(
        cls, where: str | os.PathLike[str], target: PreTrainedModel | None = None, *, option: str = OPTION
    ) -> DraftHeads:
        """Heads from a folder or hub id, in evaluation mode: as stored, or with ``target``'s dtype and device.

        ``option`` is the first word of every error.

        Raises:
            ValueError: no such folder, it holds none, or they were made for a model of another shape than ``target``.
        """
        folder = fetch(where, option)
        try:
            checkpoint = Checkpoint(folder, read_json(folder / CONFIG_FILE), headers(folder / WEIGHTS_FILE))
            own = inspect.signature(cls).parameters  # a config may say more
            with torch.device("meta"):
                heads = cls(**{name: value for name, value in checkpoint.config.items() if name in own})
            if target is not None:
                heads.check_target(target, option)
            checkpoint.load_into(heads)
        except BadCheckpoint as error:
            raise BadCheckpoint(re.sub("^drafter:", f"{option}:", str(error))) from error
        except (TypeError, ValueError, RuntimeError) as error:
            raise bad(f"{folder} holds no readable draft heads: {error}", option) from error
        return heads.placed(target)

    @classmethod
    def from_medusa(cls, folder: Path, target: PreTrainedModel | None = None) -> DraftHeads:
        """Heads from a checkpoint of Medusa: ``{head}.{layer}.linear.{weight,bias}``, ``{head}.{layers}.weight``.

        Args:
            folder: of the checkpoint.
            target: gives dtype and device; ``None``: as stored.

        Raises:
            ValueError: no such tensors, or of another model's shape; none was read.
        """
        own_name = lambda name: name.removeprefix("medusa_head.") if MEDUSA.search(name) else None  # noqa: E731
        checkpoint = Checkpoint.open(folder, own_name)
        # The blocks of a head come before its output matrix.
        outputs = {
            name: shape for name, shape in checkpoint.shapes.items() if re.fullmatch(r"\d+\.[1-9]\d*\.\w+", name)
        }
        name, shape = next(iter(outputs.items()), ("", ()))
        if len(shape) != 2:
            raise bad(f"{folder} has no Medusa heads, such as 0.0.linear.weight, 0.1.weight")
        (vocab, size), layers = shape, int(name.split(".")[1])
        count = 1 + max(int(name.partition(".")[0]) for name in checkpoint.files)
        with torch.device("meta"):
            heads = cls(size, count, num_layers=layers, output_size=vocab)
        if target is not None:
            heads.check_target(target, "drafter")
        linears = [f"{layer}.linear" for layer in range(layers)]
        parts = {f"{layers}.weight": (vocab, size)}
        parts |= {f"{name}.weight": (size, size) for name in linears} | {f"{name}.bias": (size,) for name in linears}
        found = checkpoint.read({f"{head}.{name}": shape for head in range(count) for name, shape in parts.items()})
        part = {name: torch.stack([found[f"{head}.{name}"] for head in range(count)]) for name in parts}
        weights = {
            "weight": torch.stack([part[f"{name}.weight"].mT for name in linears]),
            "bias": torch.stack([part[f"{name}.bias"][:, None] for name in linears]),
            "output": part[f"{layers}.weight"],
        }
        heads.load_state_dict(weights, assign=True)
        return heads.requires_grad_(False).placed(target)

    def placed(self, target: PreTrainedModel | None) -> DraftHeads:
        """In evaluation mode, on the device and in the dtype of ``target`` if that is given."""
        return self.eval() if target is None else self.eval().to(_device(target), target.dtype)

    def check_target(self, target: PreTrainedModel, option: str = OPTION) -> None:
        """Raise unless the heads, which ``option`` named, were made for a model of this shape.

        Raises:
            ValueError: the first field that differs.
        """
        shape = shape_of(target)
        for name, made_for in ({"hidden_size": self.hidden_size} | self.target).items():
            if shape.get(name) != made_for:
                raise bad(
                    f"made for a target with {name}={made_for!r}, and this one has {shape.get(name)!r}; "
                    "heads belong to the model that they were trained on (gsd-kernels train-heads)",
                    option,
                )
        if self.output_size is not None:
            check_sizes("Medusa", self.output_size, self.hidden_size, target, option=option)

    def __repr__(self) -> str:
        sizes = f"hidden_size={self.hidden_size}, num_heads={self.num_heads}, num_layers={self.num_layers}"
        made_for = f", made for {self.target['model_type']}" if "model_type" in self.target else ""
        return f"<DraftHeads: {sizes}{made_for}>"


def shape_of(target: PreTrainedModel) -> dict[str, int | str]:
    """Kind, width, layers and vocabulary of a target, by which heads tell it from others."""
    config = text_config(target)
    return {
        "model_type": config.model_type,
        "hidden_size": int(config.hidden_size),
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": vocabulary(target),
    }


def _device(target: PreTrainedModel) -> torch.device:
    """The output layer's; a model that is spread over devices ends there."""
    return device_of_weights(target.get_output_embeddings())


class Heads(LastState, Lattice):
    """Prediction heads on the target's last hidden state: candidates by depth, the same below every path.

    Blockwise parallel decoding (arXiv 1811.03115), Medusa (arXiv 2401.10774).
    """

    name = "heads"

    def __init__(self, heads: DraftHeads, option: str = OPTION) -> None:
        self.heads, self.option = heads, option  # the option that named them
        self.shares = shares_of(heads.num_heads)

    def check(self, target: PreTrainedModel) -> None:
        """Raise unless the heads were made for ``target`` and lie where its output matrix does."""
        self.heads.check_target(target, self.option)
        mine, theirs = self.heads.weight.device, _device(target)
        if mine != theirs:
            raise ValueError(f"{self.option}: on {mine}, and the target's output matrix on {theirs}; move them there")

    def start(self, text: Text) -> None:
        super().start(text)
        self.lm_head = text.target.stepping.get_output_embeddings()
        self.vocabulary = DraftVocabulary(None, text.target.vocab_size, text.target.vocab_size)

    def levels(self, config: GraphConfig) -> int:
        """Return the number of heads: the history is alone below, and would be weighed against nothing."""
        return self.heads.num_heads

    def step(self, level: Level, *, emitted: bool = True) -> None:
        self.keep_positions(self.heads(self.hidden, self.lm_head), level)

    def ranked(self, logits: Tensor, positions: Tensor, branch: int) -> Candidates:
        tokens, log_probs = super().ranked(logits, positions, branch)
        known = self.known[:, None, None]
        return torch.where(known, tokens, -1), torch.where(known, log_probs, -torch.inf)
