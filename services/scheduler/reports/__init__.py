"""Output of the scheduler: status, metrics, traces, the event log."""
