"""What the modes and policies of the scheduler bring with real processes over a real nats-server: one file
for each measurement, run by `loadtest.real_modes`."""
