"""Where text comes from: files, tables, datasets, packages and the standard library, read as documents."""
