"""Training steps of several ranks against the same steps of one: speed, memory, and bytes sent."""
