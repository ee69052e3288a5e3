"""The load client: NATS and any OpenAI HTTP server, measured by one program (docs/guides/load_test.md).

arrivals.py   when requests are sent           workloads.py, chats.py, replay.py   what is asked
drive.py      open and closed loop             over_nats.py, over_http.py          how it is sent
repeats.py     what a trace's prompts share
record.py     what the client saw              figures.py, block.py                what is made of it
run.py        points of a sweep, in turn       document.py                         the JSON
compare.py, plot.py, page.py                   two files side by side; pictures; HTML
"""
