"""Training of drafts and heads for a target. Decoding never imports it."""
