"""Names that SGLang and transformers import of torchvision, for text models on a CPU; none of them is called."""

import enum
import sys
import types

__version__ = "0.27.0"


InterpolationMode = enum.Enum("InterpolationMode", "NEAREST BILINEAR BICUBIC LANCZOS NEAREST_EXACT BOX HAMMING")


def unavailable(*args, **kwargs):
    raise NotImplementedError("torchvision is a stub here")


def module(name: str, **names: object) -> types.ModuleType:
    new = types.ModuleType(f"{__name__}.{name}")
    new.__dict__.update(names)
    parent, _, child = new.__name__.rpartition(".")
    setattr(sys.modules[parent], child, new)
    sys.modules[new.__name__] = new
    return new


module("io", ImageReadMode=enum.Enum("ImageReadMode", "RGB"), decode_image=unavailable, decode_jpeg=unavailable)
for name in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    module(name, InterpolationMode=InterpolationMode, pil_to_tensor=unavailable)
