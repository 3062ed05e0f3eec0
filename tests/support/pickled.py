"""A model that has been written to a file and read again."""

import io

import torch
from torch import nn


def pickled(model: nn.Module) -> nn.Module:
    """A copy of a model by way of torch.save and torch.load."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)
