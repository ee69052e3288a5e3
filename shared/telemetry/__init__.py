"""Traces and metrics: plain data (traces.py, readings.py), export (export.py, metrics.py, otel*.py)."""
