"""Graph-structured speculative decoding in SGLang: ``--speculative-algorithm GSD``.

SGLang finds the package by its entry point; nothing here is called by a user. ``plugin``, ``algorithm`` and ``worker``
meet SGLang, one file each, and are imported where it runs; all else needs ``gsd_kernels`` only, which this package may
import and which never imports it. docs/served.md is the user's page.
"""
