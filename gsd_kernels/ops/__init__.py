"""One room per operation: ``api`` validates and dispatches, ``reference`` is the specification in plain PyTorch."""
