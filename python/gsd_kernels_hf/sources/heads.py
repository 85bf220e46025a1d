"""Drafters that read the target's last hidden state alone: heads, and Gemma 4's assistants.

Heads let a target draft for itself: each guesses a later token. Blockwise parallel decoding (arXiv 1811.03115) in the
form of Medusa (arXiv 2401.10774, section 2.1.1): head k adds a residual block to the hidden state that the target's own
output matrix reads, and goes through that matrix. ``gsd-kernels train-heads`` trains them; the target is not changed.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from gsd_kernels import GraphConfig

from ..files import path_of, write_file, write_json
from ..model.attention import AttentionKind, GraphInputs, configs_in, switched_configs
from ..model.properties import text_config, vocabulary
from ..packed.modules import device_of_weights
from .base import Level, Text
from .checkpoints import (
    BELONGS,
    CONFIG,
    BadCheckpoint,
    Checkpoint,
    bad,
    check,
    check_sizes,
    fetch,
    headers,
    move_to,
    read_json,
    shapes_of,
)
from .expansion import DraftVocabulary, Lattice, NodeVectors
from .features import LastState, Recursion
from .layouts import GEMMA4

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
        heads = cls(shape["hidden_size"], num_heads, num_layers=num_layers, target=shape)
        return heads.to(_device(target), target.dtype)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write ``draft_heads.safetensors`` and ``draft_heads.json`` into ``folder``, which is made if need be."""
        folder = path_of(folder)
        folder.mkdir(parents=True, exist_ok=True)
        settings = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        config = {name: value for name, value in settings.items() if value is not None}
        weights = {name: value.cpu().contiguous() for name, value in self.state_dict().items()}
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
        # By head and place in it: the output matrix comes behind the blocks.
        places = {tuple(map(int, name.split(".")[:2])): shape for name, shape in checkpoint.shapes.items()}
        (last, layers), shape = max(places.items(), default=((0, 0), ()))
        if not layers or len(shape) != 2:
            raise bad(f"{folder} has no Medusa heads, such as 0.0.linear.weight, 0.1.weight")
        (vocab, size), count = shape, last + 1
        with torch.device("meta"):
            heads = cls(size, count, num_layers=layers, output_size=vocab)
        if target is not None:
            heads.check_target(target, "drafter")
        blocks = [f"{head}.{layer}.linear" for layer in range(layers) for head in range(count)]
        parts = {
            "weight": {f"{block}.weight": (size, size) for block in blocks},
            "bias": {f"{block}.bias": (size,) for block in blocks},
            "output": {f"{head}.{layers}.weight": shape for head in range(count)},
        }
        weights = checkpoint.stacked(parts, shapes_of(heads))
        weights["weight"] = weights["weight"].mT.contiguous()
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


def shape_of(target: PreTrainedModel) -> dict[str, Any]:
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
        self.drafted = heads.num_heads

    def check(self, target: PreTrainedModel) -> None:
        """Raise unless the heads were made for ``target`` and lie where its output matrix does."""
        self.heads.check_target(target, self.option)
        mine, theirs = self.heads.weight.device, _device(target)
        if mine != theirs:
            raise ValueError(f"{self.option}: on {mine}, and the target's output matrix on {theirs}; move them there")

    def start(self, text: Text) -> None:
        super().start(text)
        self.lm_head = text.target.stepping.get_output_embeddings()
        self.vocabulary = DraftVocabulary(text.target.vocab_size)

    def step(self, level: Level, end: Tensor) -> None:
        self.keep_positions(self.heads(self.hidden, self.lm_head), level)


# Gemma 4's assistants: a small model that reads the target's own keys and values, drafting a graph without a cache.
#
# All its layers attend to what the target's last layers of their type have stored, from one place: where the root is. A
# row reads the embedding of a node's token and the vector of the node before it, so a level is a batch of such pairs.
# transformers drafts a chain for one sequence with it.

Stored = dict[str, tuple[Tensor, Tensor]]
"""Keys and values [B, Hkv, S, D] by type of layer."""


class Gemma4Assistant(nn.Module):
    """An assistant of a Gemma 4 model: ``patch(model, drafter=folder_or_id)``.

    Args:
        model: as transformers loads it, a ``Gemma4AssistantForCausalLM``.
    """

    kind = "Gemma 4"

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model, self.sizes = model, model.config.get_text_config()
        self.width = model.config.backbone_hidden_size  # of the target
        self.configs, types = configs_in(model.modules()), self.sizes.layer_types
        # transformers' mask has both ends in it, and the root's own place is not stored.
        window = self.sizes.sliding_window
        self.kinds = tuple(AttentionKind(window + 2 if kind == "sliding_attention" else None) for kind in types)

    @classmethod
    def from_pretrained(cls, where: str | os.PathLike[str], target: PreTrainedModel) -> Gemma4Assistant:
        """An assistant from a folder or hub id, on ``target``'s device and in its dtype.

        Raises:
            ValueError: none that can be served, or another model's; the message names what and the cure.
        """
        folder = fetch(where)
        kind = getattr(transformers, GEMMA4, None)
        if kind is None:
            raise bad(f"{folder} is a Gemma 4 assistant; it needs transformers with {GEMMA4}")
        try:
            config = kind.config_class.from_dict(read_json(folder / CONFIG))
            with torch.device("meta"):
                empty = kind(config)
        except Exception as error:  # whatever transformers' classes say
            raise bad(f"{folder} has no readable config of a Gemma 4 assistant: {error}") from error
        cls(empty).check_target(target)
        model, report = kind.from_pretrained(folder, dtype=target.dtype, output_loading_info=True)
        strange = [*report["missing_keys"], *report["mismatched_keys"]]
        if strange:
            raise bad(f"{folder} lacks {strange[0]}, or has it in another shape")
        found = cls(model)
        move_to(found, target)
        return found

    def __repr__(self) -> str:
        return f"<Gemma4Assistant: {len(self.kinds)} layer(s) of width {self.sizes.hidden_size}>"

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise unless the assistant fits a target's vocabulary, width and types of layers.

        Raises:
            ValueError: the difference and the cure.
        """
        check_sizes(self.kind, self.sizes.vocab_size, self.width, target)
        reads, stored, of = "this Gemma 4 assistant reads", stored_by(target), type(target).__name__
        for kind, (_, heads, size) in by_type(self.sizes).items():
            if kind not in stored:
                raise bad(f"{reads} keys and values of {kind} layers, which {of} does not have; {BELONGS}")
            _, *theirs = stored[kind]
            if theirs != [heads, size]:
                raise bad(
                    f"{reads} {heads} heads of {size} of {kind} layers, and those of {of} store "
                    f"{theirs[0]} of {theirs[1]}; {BELONGS}"
                )

    def forward(self, embedded: Tensor, features: Tensor, positions: Tensor, stored: Stored, graph: Any) -> Any:
        """One level: the vectors that nodes hand on [B, W, D], and logits [B, W, V].

        Args:
            embedded: [B, W, D], of the nodes' tokens, by the target's embedding.
            features: [B, W, D], of the target for the root, else vectors of the nodes before.
            positions: int64 [B, W], of the root.
            stored: of the target's last layers.
            graph: what the rows see of it.
        """
        model, text = self.model, self.model.model  # whose own forwards take one row a sequence
        hidden = model.pre_projection(torch.cat([embedded, features], -1))
        turns = {kind: text.rotary_emb(hidden, positions, kind) for kind in stored}
        with switched_configs(self.configs):
            for layer, kind in zip(text.layers, self.sizes.layer_types, strict=True):
                hidden = layer(
                    hidden,
                    shared_kv_states=stored,
                    position_embeddings=turns[kind],
                    position_ids=positions,
                    graph=graph,
                )
        hidden, ordered = text.norm(hidden), model.masked_embedding
        vectors = model.post_projection(hidden)
        if ordered is None:
            return vectors, model.lm_head(hidden)
        # With ordered embeddings there are logits of the tokens of the best clusters, and −∞ elsewhere.
        best = ordered.centroids(hidden).topk(ordered.centroid_intermediate_top_k, -1).indices  # [B, W, k]
        tokens = ordered.token_ordering.long().view(ordered.num_centroids, -1)[best].flatten(2)  # [B, W, n]
        scores = torch.einsum("bwd,bwnd->bwn", hidden, model.lm_head.weight[tokens])
        whole = hidden.new_full((*hidden.shape[:2], self.sizes.vocab_size), -torch.inf)
        return vectors, whole.scatter(-1, tokens, scores)


def by_type(config: PretrainedConfig, layers: int | None = None) -> dict[str, tuple[Any, ...]]:
    """Of every type the last of the first ``layers``: its number, heads of keys and values, their size."""
    each = zip((getattr(config, "layer_types", None) or ())[:layers], config.per_layer_config, strict=False)
    names = "num_key_value_heads", "head_dim"
    return {kind: (i, *(getattr(layer, name, None) for name in names)) for i, (kind, layer) in enumerate(each)}


def stored_by(target: PreTrainedModel) -> dict[str, tuple[Any, ...]]:
    """The same of the layers that store keys and values of their own."""
    config = text_config(target)
    return by_type(config, config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0))


class AssistantDrafts(LastState, Recursion):
    """The draft source of a :class:`Gemma4Assistant`: keys and values are the target's, as they lie there."""

    name = "gemma4_assistant"
    stem = 1

    def __init__(self, module: Gemma4Assistant) -> None:
        self.module, self.forwards = module, (module,)

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a target that the assistant was not made for."""
        check(self.module, target)

    def start(self, text: Text) -> None:
        super().start(text)
        self.head, self.vectors = self.module.model.lm_head, NodeVectors()
        self.vocabulary = DraftVocabulary(text.target.vocab_size)
        self.embed = text.target.stepping.get_input_embeddings()
        stored = stored_by(text.target.model)
        self.layers = {kind: stored[kind][0] for kind in self.module.sizes.layer_types}
        self.device = self.module.model.device

    def prepare(self, config: GraphConfig) -> None:
        """Make the storage of a shape."""
        self.vectors.prepare(config, self.hidden.to(self.device), self.module.width)

    def launch(self, level: Level) -> None:
        """Forward a frontier, which writes nothing."""
        self.nodes(level, None)

    def nodes(self, level: Level, vectors: Tensor | None) -> tuple[Tensor, Tensor]:
        """See :meth:`Recursion.nodes`; all 0 for a text of which the target has read nothing yet."""
        tokens, cached = level.frontier.token_ids, self.text.target.cache.layers
        if vectors is None:
            vectors = self.hidden[:, None].to(self.device, self.module.model.dtype).expand(-1, tokens.shape[1], -1)
        if not all(cached[index].is_initialized for index in self.layers.values()):
            return torch.zeros_like(vectors), self.no_logits(tokens.shape[1])
        kv_len, kv_start, to = self.text.kv_len, self.state.kv_start, self.device
        zeros = torch.zeros_like(tokens, dtype=torch.int32)  # [B, W]; all rows are where the root is
        graph = zeros[..., None], kv_len, kv_start, zeros, zeros[:, :1], self.text.target.backend
        inputs = GraphInputs(*graph, self.module.kinds)
        stored = {kind: (cached[index].keys.to(to), cached[index].values.to(to)) for kind, index in self.layers.items()}
        embedded = self.embed(tokens.long()).to(vectors.dtype)
        positions = (kv_len - kv_start)[:, None].long().expand(tokens.shape)
        vectors, logits = self.module(embedded, vectors, positions, stored, inputs)
        inputs.check_complete()
        known = self.known[:, None, None]
        return torch.where(known, vectors, 0.0), torch.where(known, logits, 0.0)
