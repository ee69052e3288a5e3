"""Executor: owns device memory. Runs the plans of the scheduler, never decides who runs."""
