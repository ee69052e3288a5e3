"""What every layer of a step reads, worked out once from the step's columns and the state of the slots."""
