"""An engine of several ranks has its driver in the actor's process and a worker process for each other
rank."""
