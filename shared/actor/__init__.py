"""What every service is made of: a runtime, a mailbox, numbered streams, the fleet's members."""
