"""Traces and metrics: plain data (traces.py, readings.py), export (tracer.py, metrics.py, otel*.py)."""
