"""Load tests and benches. May import anything; imported by nothing."""
