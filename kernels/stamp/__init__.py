"""The device's clock, written by a kernel: when something on a stream began and ended, in graphs, too."""
