"""Shared by all benchmarks: timing, environment, intervals, results, options. Imports no other room."""
