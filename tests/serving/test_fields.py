"""Every row of the server's table, on a running server: an effect, a refusal by its name, or nothing at all."""

from __future__ import annotations

import effects_told  # noqa: F401  (whose effects join those of effects)
import pytest
from effects import EFFECTS
from served import LENGTH, TOOL, known, row_id

from gsd_kernels_serve import fields

pytestmark = pytest.mark.slow

ROWS = [(endpoint, name) for endpoint in fields.ENDPOINTS for name in fields.rows(endpoint)]


def of(treatment: str) -> list[tuple[str, str]]:
    return [row for row in ROWS if fields.rows(row[0])[row[1]].treatment == treatment]


# ---- the table itself


@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_the_table_has_every_field_of_the_client_and_says_which_are_not(endpoint):
    table = fields.rows(endpoint)
    assert not known(endpoint) - set(table), "fields of this client that nothing is decided about"
    assert not {name for name, field in table.items() if field.own} & known(endpoint)


def test_every_row_is_tried():
    assert set(EFFECTS) == set(of(fields.HONOURED))
    assert {name for _, name in of(fields.REFUSED)} == set(REFUSED_VALUES)
    assert {name for _, name in of(fields.HARMLESS)} == set(HARMLESS_VALUES)


# ---- honoured: an effect that is seen


@pytest.mark.parametrize(("endpoint", "name"), of(fields.HONOURED), ids=row_id)
def test_honoured(endpoint, name, server):
    EFFECTS[endpoint, name](server, endpoint)


# ---- harmless: any valid value gives the same answer

HARMLESS_VALUES = {
    "user": ("me", 7),
    "safety_identifier": ("me", 7),
    "prompt_cache_key": ("me", 7),
    "service_tier": ("auto", "priority"),
    "max_tool_calls": (3, 0),
    "parallel_tool_calls": (False, 1),
    "verbosity": ("low", "loud"),
}


@pytest.mark.parametrize(("endpoint", "name"), of(fields.HARMLESS), ids=row_id)
def test_harmless(endpoint, name, server):
    good, bad = HARMLESS_VALUES[name]
    assert server.text(endpoint, **{name: good}) == server.text(endpoint)
    assert server.refusal(endpoint, **{name: bad})["param"] == name


# ---- refused: by name; null and what asks for nothing are not

REFUSED_VALUES = {
    "suffix": "x",
    "store": True,
    "metadata": {"a": "b"},
    "previous_response_id": "resp_1",
    "conversation": "conv_1",
    "background": True,
    "background_options": {"webhook": "x"},
    "prompt": {"id": "pmpt_1"},
    "context_management": [{"type": "compaction"}],
    "truncation": "auto",
    "stream_options": {"include_obfuscation": True},
    "modalities": ["text", "audio"],
    "audio": {"voice": "x", "format": "wav"},
    "image": {"size": "x"},
    "web_search_options": {},
    "functions": [TOOL],
    "function_call": "auto",
    "moderation": {"model": "x"},
    "access_programs": {"x": 1},
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit"},
}


@pytest.mark.parametrize(("endpoint", "name"), of(fields.REFUSED), ids=row_id)
def test_refused(endpoint, name, server):
    refused = server.refusal(endpoint, **{name: REFUSED_VALUES[name]})
    assert refused["param"] == name and refused["message"].startswith(f"{name}: not served")
    for value in (None, *fields.rows(endpoint)[name].default):
        server.got(endpoint, **{LENGTH[endpoint]: 1, name: value})


@pytest.mark.parametrize("endpoint", fields.ENDPOINTS, ids=row_id)
def test_what_the_table_does_not_know_is_refused_by_name(endpoint, server):
    for name in ("best_off", "max_new_tokens", "guided_json"):
        assert server.refusal(endpoint, **{name: 1})["param"] == name
        assert server.refusal(endpoint, **{name: None})["param"] == name
    status, found = server.raw(endpoint, {"temperature": 0})
    assert status == 400 and found["error"]["param"] == fields.NEEDED[endpoint]
    for bad in (b"[]", b"{"):
        status, found = server.raw(endpoint, bad)
        assert status == 400 and found["error"]["type"] == "invalid_request_error"
