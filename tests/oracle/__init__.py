"""A second, slow implementation of docs/nvfp4.md in integer arithmetic, written from that page alone.

No line of it looks at the package it checks, and none of its arithmetic uses torch, numpy or a float: a
number is its bit pattern; an operation is exact in integers, then rounded once. Only `bridge` knows tensors.
"""
