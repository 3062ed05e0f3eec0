"""From documents to token files: encode, split, write, and resume after an interruption."""
