"""A report of a GPU's FP4 arithmetic, written on that GPU and recomputed on any CPU. docs/blackwell.md."""
