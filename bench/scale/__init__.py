"""Larger than one device: memory by GPUs, messages between ranks, memory of long prompts."""
