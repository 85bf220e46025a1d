"""examples/gsd_in_100_lines.py as a module: the tests' oracle of merge, flatten and whole texts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

PATH = Path(__file__).resolve().parents[1] / "examples" / "gsd_in_100_lines.py"


def load() -> ModuleType:
    if PATH.stem not in sys.modules:
        spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
        sys.modules[PATH.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[PATH.stem])
    return sys.modules[PATH.stem]
