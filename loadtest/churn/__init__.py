"""Many short requests with clients that cancel and vanish at any time, and what each process holds meanwhile.

clients.py           the clients over NATS and HTTP, and how each request ends
heap.py              what a process has allocated, asked for by a signal
watch.py             samples of every process, and a straight line through the later half
__main__.py          the run and its verdict, `python -m loadtest.churn`
"""
