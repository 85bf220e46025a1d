"""All refusals: what cannot be served is named, with the cure, before anything is changed.

May import :mod:`gsd_kernels` and :mod:`gsd_kernels_hf.model`.
"""

from ..model.modes import Unsupported
from .calls import check_call, check_listeners
from .inputs import check_padding, check_prompt, check_reference
from .models import check_backend, check_model, check_pair, check_paths, check_tokenizers
from .options import check_arguments, check_counts, check_generation_config

__all__ = [
    "Unsupported",
    "check_arguments",
    "check_backend",
    "check_call",
    "check_counts",
    "check_generation_config",
    "check_listeners",
    "check_model",
    "check_padding",
    "check_pair",
    "check_paths",
    "check_prompt",
    "check_reference",
    "check_tokenizers",
]
