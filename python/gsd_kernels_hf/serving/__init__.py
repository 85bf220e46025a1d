"""An OpenAI-compatible server: transformers' own (``transformers serve``), with one patched model.

May import everything that decodes; only :mod:`gsd_kernels_hf.cli` imports it. Routes, formats, templates and streams
are transformers'; this room hands it the model, carries a request's seed to the call that decodes it, and its
statistics back.
"""
