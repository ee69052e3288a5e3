"""The parts of every service: a runtime, a mailbox, numbered streams and the membership of the fleet."""
