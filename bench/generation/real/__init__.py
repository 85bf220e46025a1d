"""Everyday work for a real chat model, beside transformers, OpenVINO GenAI and llama.cpp in the same rounds."""
