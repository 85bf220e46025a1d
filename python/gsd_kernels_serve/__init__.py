"""An OpenAI-compatible server: transformers' own (``transformers serve``), with one patched model.

May import everything that decodes, and for its command the shell; nothing imports it. Routes, templates and the reading
of answers are transformers'; a request is read by one table of fields, its texts are decoded one after another, and the
endpoint that was asked tells them.
"""
