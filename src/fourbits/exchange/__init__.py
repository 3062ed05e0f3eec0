"""Import and export of Hugging Face transformers models; independent of precision."""
