"""Recipes: the format of every operand of the three GEMMs of a linear layer."""
