"""Experts whose weights are one parameter each, in any model: found, and multiplied by a recipe's table."""
