"""Other implementations of the same work, measured where they are installed."""
