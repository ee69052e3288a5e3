"""The gateway translates the OpenAI API over HTTP to and from the native protocol.

actor.py             the process: uvicorn and a native client
app.py               the application: the table of paths, and the middleware around every request
endpoints.py         what the endpoints of every API are made of
connection.py        one connection, with time limits for its peer
exchange.py          one HTTP request from its first byte to its last, its errors, and the counters
native_call.py       the native requests of one HTTP request, the connections of tenants, the state of health
openai_response.py   native answers and frames -> OpenAI's
dialects/            other APIs, and requests that are read later: each adds its paths to those of app.py
store.py             what a keeper has of one tenant
openapi.py           the OpenAPI document
visitors.py          API keys, and which pages of browsers may use a gateway
"""
