"""Traces and metrics: plain data (traces.py, counters.py), export (export.py, metrics.py, otel*.py)."""
