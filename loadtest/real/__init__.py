"""A fleet of real processes, the record of its steps, and reports, for the studies that need them."""
