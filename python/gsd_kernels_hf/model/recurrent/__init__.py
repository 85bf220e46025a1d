"""Recurrent layers (linear attention, state spaces, short convolutions) over graph rows: one file a form."""
