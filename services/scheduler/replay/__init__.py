"""The scheduler as a function of its log: write the log, recompute it, ask what another policy had done."""
