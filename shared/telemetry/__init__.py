"""Traces and metrics, with and without OpenTelemetry."""
