"""The `fourbits` command: parses, calls, prints, exits."""
