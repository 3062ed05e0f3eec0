"""One run: a model, a recipe and data, trained step by step into a folder that can be resumed bit by bit."""
