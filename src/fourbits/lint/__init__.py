"""Common mistakes in a configuration, found before training. docs/lint.md lists the rules."""
