"""Model folders that decode by themselves, by transformers' ``custom_generate``: what one does, and its files."""
