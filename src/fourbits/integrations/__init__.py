"""Other people's training loops: each file connects one library, which it imports. docs/integrations.md."""
