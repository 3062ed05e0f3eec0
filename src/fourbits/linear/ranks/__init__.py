"""Layers that ranks share: the table and amaxes of their parts, and calls that are sharded as DTensors."""
