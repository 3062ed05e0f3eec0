"""Nothing is compiled: see support/eager.py."""

from support.eager import eager as eager
