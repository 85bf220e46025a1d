"""These tests run in a process of their own, started by tests/test_triton_interpreter.py: triton reads the variable
once, when it is imported."""

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
