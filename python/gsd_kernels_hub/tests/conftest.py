import pytest
import torch


def pytest_configure(config):
    config.addinivalue_line("markers", "kernels_ci: runs for every build of the kernel, on each of its devices")


@pytest.fixture
def device():
    return "cuda" if torch.cuda.is_available() else "cpu"
