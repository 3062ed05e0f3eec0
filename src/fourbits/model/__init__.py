"""Hybrid Mamba-Transformer language models in plain PyTorch; nothing here knows of number formats."""
