"""Text from a trained model: batches of prompts, with what was computed for earlier tokens kept."""
