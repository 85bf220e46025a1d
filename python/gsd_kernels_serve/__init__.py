"""An OpenAI-compatible server of one patched model, on parts of transformers' own (``transformers serve``).

May import everything that decodes, and for its command the shell; nothing imports it. Templates and the reading of
answers are transformers'; a request is read by one table of fields, its texts are decoded one after another, and the
endpoint that was asked tells them.
"""
