"""Recipes of models that are in this repository: run once, by hand, from a clone."""
