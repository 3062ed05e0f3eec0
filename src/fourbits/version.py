"""The version, in the source: a source tree on PYTHONPATH has no installed metadata to ask."""

VERSION = "0.1.0"
