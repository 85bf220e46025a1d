"""The shell: the command ``gsd-kernels``, and for people to read: comparing runs, drawing a step, the demo.

Imports everything that decodes, and no other satellite: commands of training and serving are found by their entry
points. Those import from here what commands share: output and exit codes, loading a pair, torchrun's processes.
"""
