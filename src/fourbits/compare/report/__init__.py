"""Reads finished runs and presents them: tables, charts, and report.html."""
