"""Low-rank adapters of an executor: what PEFT has saved, their places in an engine, and their loads.

peft.py      a folder of PEFT to matrices; what it may not have is refused by name
reading.py   an adapter in host memory, in the form that products take
places.py    the adapters of an engine of a CPU by place, and the lines of a step's rows
device_places.py  those of a GPU
shell.py     loads beside steps, copies in host memory, the messages of the scheduler
"""
