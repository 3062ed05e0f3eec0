"""Measures what each technique of a 4-bit recipe fixes on one trained BF16 model, without training it."""
