"""Several recipes and seeds on one configuration: `run` executes them, `report` presents the results."""
