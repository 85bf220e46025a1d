"""Where the configs of published drafters that read features say what: a row for each way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .checkpoints import bad

NESTED = "transformer_layer_config"
"""Of configs as ``speculators`` writes them: where the sizes of the layers are."""


@dataclass(frozen=True)
class ConfigLayout:
    """A kind of ``config.json``: where it says what.

    Attributes:
        mark: a key that it has, and those before it in a table do not.
        layers: name of the list of fused layers.
        shift: what is added to their numbers: 1 where it lists layers whose outputs are fused, not what layers read.
        sizes, settings: the key that the sizes of the layers, or the rest, is nested in; empty: it is not.
        fixed: settings that it has no word for.
    """

    mark: str
    layers: str
    shift: int = 0
    sizes: str = ""
    settings: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)

    def sizes_in(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part of a config that has the sizes of layers."""
        return config[self.sizes] if self.sizes else config

    def settings_in(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The part that has the rest."""
        return config[self.settings] if self.settings else config


def layout_of(config: Mapping[str, Any], layouts: Iterable[ConfigLayout]) -> ConfigLayout | None:
    """The first of a drafter's layouts that a config is of."""
    for layout in layouts:
        value = config.get(layout.mark)
        if isinstance(value, dict) if layout.mark in (layout.sizes, layout.settings) else value is not None:
            return layout
    return None


def layer_numbers(name: str, value: Any, shift: int = 0) -> tuple[int, ...]:
    """Numbers of hidden states that a config lists, each ``shift`` higher.

    Raises:
        BadCheckpoint: not a list of different layers.
    """
    good = isinstance(value, (list, tuple)) and value and all(type(i) is int and i + shift >= 0 for i in value)
    if not good or len(set(value)) < len(value):
        raise bad(f"{name} in its config: expected a list of different layers, got {value!r}")
    return tuple(i + shift for i in value)
