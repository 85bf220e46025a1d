"""Benchmarks that need a GPU: the staged run of all benchmarks, and tuning of the attention launches."""
