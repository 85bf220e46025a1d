"""The demo pair, served once for all files."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("served")


@pytest.fixture(scope="package")
def server():
    from served import Server  # which skips the file that asks, where the extra is missing

    server = Server()
    yield server
    server.stop()
