"""Whole training steps: their speed by recipe, memory, and device time by type of layer."""
