"""Products of few rows with a large weight."""
