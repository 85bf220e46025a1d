"""Other engines at the same generations: same weights, prompts and threads, each in a process of its own."""
