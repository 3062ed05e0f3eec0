"""Several recipes and seeds on one configuration: the runs, the table, the report."""
