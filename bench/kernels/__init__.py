"""Single ops beside their peers, and the ops of one step beside a forward. Imports ``lib`` alone."""
