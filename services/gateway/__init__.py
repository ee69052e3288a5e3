"""The gateway translates the OpenAI API over HTTP to and from the native protocol.

actor.py             the process: uvicorn and a native client
app.py               the application: paths, endpoints, API keys, and the middleware around every request
connection.py        one connection, with time limits for its peer
exchange.py          one HTTP request from its first byte to its last, and the counters
native_call.py       the native requests of one HTTP request, the connections of tenants, the state of health
openai_response.py   native answers and frames -> OpenAI's
dialects/            other APIs, and requests that are read later: each adds its paths to those of app.py
store.py             what a keeper has of one tenant
openapi.py           the OpenAPI document
errors.py            typed errors in the shape of the OpenAI API
"""
