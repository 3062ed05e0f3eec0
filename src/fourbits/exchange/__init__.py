"""Models in the layouts of Hugging Face transformers, both ways; nothing about precision."""
