"""The load client: measures Headrace over NATS and any OpenAI HTTP server (docs/guides/load_test.md).

arrivals.py   times of requests                workloads.py, chats.py, replay.py   contents of requests
drive.py      open and closed loop             over_nats.py, over_http.py          transports
repeats.py    shared prefixes of a trace
record.py     timestamps of one request        figures.py, block.py                figures and their text
run.py        the points of a sweep            document.py                         the JSON
compare.py, plot.py, page.py                   two results side by side; pictures; HTML
"""
