"""What every layer of a step reads, worked out once from the step's columns and the state of the slots.

And the device's clock, written by a kernel: when something on a stream began and ended, in graphs, too.
"""
