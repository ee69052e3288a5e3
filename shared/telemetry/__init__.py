"""Traces and metrics: as plain data (traces.py, readings.py), and on their way out (otel.py, metrics.py)."""
