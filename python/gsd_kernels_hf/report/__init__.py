"""For people to read: comparing runs, drawing a step.

May import everything that decodes; nothing that decodes imports it.
"""
