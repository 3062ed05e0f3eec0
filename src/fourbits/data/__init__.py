"""Data: corpora reads text, prepare writes token files, stream reads samples; knows nothing of models."""
