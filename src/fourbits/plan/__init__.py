"""What a run will need and cost on a cluster, before it is bought. docs/plan.md has the formulas."""
