"""Meets a fleet of the real model with faults of its host under load, and counts what its clients get.

place.py             what a case may touch: a fleet in its own mount namespace, folders, disks, limits
cases.py             the cases: memory, /dev/shm, descriptors, the folder of state, the model's files
watch.py             clients that send until they are stopped, durable requests beside them, and the verdicts
__main__.py          all cases in turn, `python -m loadtest.host_faults`
"""
