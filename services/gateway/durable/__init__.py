"""Durable requests over HTTP: sent now, read later, by any client of the tenant.

store.py       what a keeper has for one tenant: submit, state, frames, cancel; responses that are kept
endpoints.py   202 for `Prefer: respond-async`, GET by id as JSON or a stream, cancel
endpoints.py    the chunks of chats and completions, with numbers from which a reader goes on
"""
