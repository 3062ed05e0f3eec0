"""Speed of the quantizers and of a linear, beside what the machine could do at best in the same run."""
