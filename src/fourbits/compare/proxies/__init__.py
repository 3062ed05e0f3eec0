"""What a recipe costs one trained BF16 model, without the noise of training, and which layers cost most."""
