"""An engine of several ranks: the driver in the actor's process, a worker process for each other rank."""
