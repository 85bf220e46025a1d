"""The engine: sessions, the step of six verbs, the loop, captured steps, and what a generation did in numbers.

May import acceptance, policy, sources, parallel, validate and model.
"""
