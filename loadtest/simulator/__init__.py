"""A virtual world for the real scheduler: engines with a step-time formula, a detokenizer, clients and a
clock that jumps from event to event. Results are those of a model of the machine, never measurements."""
