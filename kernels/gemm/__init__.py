"""Products with a large weight: for few rows, limited by memory, and with the same bits for any number of
rows."""
