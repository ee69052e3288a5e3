"""The simulated engine computes tokens by a formula and takes the times of a step model."""
