"""Products with a large weight: of few rows, bound by reading it, and of any number with the same bits."""
