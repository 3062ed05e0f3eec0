"""Experts whose weights are stacked in one parameter, in any model: how they are found and multiplied."""
