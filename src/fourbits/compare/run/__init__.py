"""Executes the runs of a comparison: which runs, how many in parallel, on which processes."""
