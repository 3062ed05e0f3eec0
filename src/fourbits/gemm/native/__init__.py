"""GEMMs on FP4 tensor cores, and the self-check that admits them."""
