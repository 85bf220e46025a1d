"""The keywords that type checkers know are those that the options and transformers' own arguments are."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import get_args, get_type_hints

import gsd_kernels
from gsd_kernels.config import AUTO, PLAIN, PRESETS, GraphName
from gsd_kernels_hf.engine.arguments import GenerateArguments, OptionArguments
from gsd_kernels_hf.engine.options import Options
from gsd_kernels_hf.validate.options import CONFIG_FIELDS, GENERATE_PARAMETERS, HONOURED


def test_options_agree_name_by_name_and_type_by_type():
    declared = get_type_hints(Options)
    options = {field.name: declared[field.name] for field in fields(Options)}
    assert get_type_hints(OptionArguments) == options
    assert list(OptionArguments.__annotations__) == list(options), "in the same order, for editors"
    assert not OptionArguments.__required_keys__ and not GenerateArguments.__required_keys__


def test_what_is_honoured_of_transformers_own_arguments_is_known_to_type_checkers():
    treated = {name for name, (treatment, *_) in CONFIG_FIELDS.items() if treatment == HONOURED}
    treated |= {name for name, treatment in GENERATE_PARAMETERS.items() if treatment == HONOURED}
    explicit = set(inspect.signature(inspect.unwrap(gsd_kernels.generate)).parameters)
    # generate gives its own custom_generate; use_cache changes nothing, and transformers' users pass it.
    expected = treated - explicit - {field.name for field in fields(Options)} - {"custom_generate"} | {"use_cache"}
    known = set(get_type_hints(GenerateArguments)) - set(get_type_hints(OptionArguments))
    assert known == expected


def test_shapes_are_known_to_type_checkers():
    assert set(get_args(GraphName)) == {AUTO, PLAIN, *PRESETS}
