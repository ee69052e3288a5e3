"""What an operator or the launcher changes in a running scheduler."""
