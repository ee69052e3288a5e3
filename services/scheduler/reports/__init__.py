"""What the scheduler tells: status, metrics, traces, the event log."""
