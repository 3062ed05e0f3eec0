"""What a number is: element formats and block formats as data, rounding, codes, packing."""
