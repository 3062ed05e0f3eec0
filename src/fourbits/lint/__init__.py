"""The mistakes of practice in a configuration, found before it trains. docs/lint.md lists the rules."""
