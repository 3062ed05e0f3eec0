"""Evaluation of a trained or imported model: loss, tasks, and what a recipe costs it."""
