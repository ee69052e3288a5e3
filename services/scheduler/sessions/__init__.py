"""Sessions: which prompts extend each other, how long they pause, and what their blocks are worth meanwhile.

events.py   the hooks that the scheduler calls: `SessionEvents` in ../state/state.py
table.py    the sessions, and their bounds
match.py    which session a prompt continues
pauses.py   how long sessions pause, and whether they return, learned by the tool that runs
rise.py     blocks that come up before the next request
verbs.py    what clients ask for a session
report.py   what people see of sessions

A session owns no block: it ranks blocks, and names those that no request will use again. Losing all sessions
loses no token.
"""
