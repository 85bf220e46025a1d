"""Training of a multi-token-prediction head for a target that came without one.

DeepSeek-V3 (arXiv 2412.19437, section 2.2). The head is one decoder layer of the target's own class.
It is unrolled as EAGLE-3 is, since it is used recursively.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels_hf.model.hidden import decoder_of
from gsd_kernels_hf.sources.checkpoints import BadCheckpoint
from gsd_kernels_hf.sources.layouts import HEADS
from gsd_kernels_hf.sources.mtp import Block, Mtp, blocks_of

from .drafter import DrafterOptions, write_checkpoint
from .job import TrainingOptions, check_output_matrix, output_logits
from .unrolled import DEPTH, UnrolledTraining

WRITTEN = next(layout for layout in HEADS if layout.prefix == "mtp.")
"""The names of heads that are trained here."""
WANTED = ("full_attention", None, "sliding_attention")
"""Types of attention that a new head's layer may have, the best first."""


def block_to_train(target: PreTrainedModel) -> Block:
    """The target's decoder layer that a new head has: with attention, over all positions if it can be, the smallest.

    Raises:
        BadCheckpoint: layers cannot be made by themselves, or none is of attention.
    """
    blocks = [block for block in blocks_of(target) if hasattr(block.module, "self_attn") and block.attention in WANTED]
    if not blocks:
        raise BadCheckpoint(f"target: {type(target).__name__} has no decoder layer of attention that a head could have")
    return min(
        blocks, key=lambda block: (WANTED.index(block.attention), sum(p.numel() for p in block.module.parameters()))
    )


def new_head(block: Block) -> Mtp:
    """A head to be trained: new norms and projection, and a copy of the target's last such layer.

    Raises:
        BadCheckpoint: no layer is alike.
    """
    head, shapes = Mtp(WRITTEN, block, bias=False), block.shapes()
    head.block = head.block.to_empty(device="cpu").requires_grad_(True)
    for layer in reversed(decoder_of(block.target)[0]):
        tensors = layer.state_dict()
        if {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes:
            head.block.load_state_dict(tensors)
            return head
    made, of = type(head.block).__name__, type(block.target).__name__
    raise BadCheckpoint(f"target: no layer of {of} has the tensors of a new {made}; its heads are not served")


class MtpTraining(UnrolledTraining):
    """A multi-token-prediction head that learns from its target.

    Raises:
        ValueError: see :meth:`DrafterTraining.begin`; or a target whose layers cannot be made by themselves, or that
            changes its logits after the output matrix, which the head shares.
    """

    kind = "mtp"

    def __init__(self, options: TrainingOptions, target: PreTrainedModel, drafter: DrafterOptions) -> None:
        super().__init__(options, target, drafter.given)
        check_output_matrix("multi-token-prediction heads", options, target)
        block = block_to_train(target)
        module = new_head(block)
        self.config = {
            "architectures": [type(target).__name__.removesuffix("ForCausalLM") + "MTP"],
            "model_type": target.config.model_type,
            "hidden_size": block.config.hidden_size,
            "vocab_size": block.config.vocab_size,
            "num_nextn_predict_layers": 1,
        }
        if block.attention is not None:
            self.config["mtp_layer_types"] = [block.attention]
        self.begin(module, (len(decoder_of(target)[0]),), drafter.depth or DEPTH)

    def initialise(self, module: Mtp) -> None:
        """It begins as the target's own guess: its last state, and a copy of its layer that adds nothing yet."""
        size = module.config.hidden_size
        for name, parameter in module.block.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.zero_()
        module.projection.weight.zero_()[:, -size:].copy_(torch.eye(size, dtype=torch.float32, device="cpu"))
        module.output_norm.load_state_dict(decoder_of(self.target)[1].state_dict())

    def outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """See :meth:`UnrolledTraining.outputs`."""
        return hidden, output_logits(self.options, self.target, hidden)

    def save(self, folder: Path) -> None:
        """Write the names of Qwen3-Next's heads, which are the commonest."""
        tensors = {self.module.layout.published_name(name): value for name, value in self.module.state_dict().items()}
        write_checkpoint(folder, self.config, tensors, self.dtype)
