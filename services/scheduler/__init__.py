"""Scheduler: owns every request and every KV block. Touches neither a tensor nor a clock."""
