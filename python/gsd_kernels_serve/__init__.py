"""An OpenAI-compatible server: transformers' own (``transformers serve``), with one patched model.

May import everything that decodes, and for its command the shell; nothing imports it. Routes, formats, templates and
streams are transformers'; this package hands it the model, carries a request's seed to the call that decodes it, and
its statistics back.
"""
