"""Evaluation tasks: log-likelihoods and answers of a model, for lm-evaluation-harness."""
