"""Number formats: element formats and block formats as data, rounding, codes, packing."""
