"""The gateway translates the OpenAI API over HTTP to and from the native protocol.

actor.py             the process: uvicorn and a native client
app.py               the application: paths, and the middleware around every request
routes.py            the endpoints of models, and the API keys
connection.py        one connection, with time limits for its peer
exchange.py          one HTTP request from its first byte to its last, and the counters
openai_request.py    HTTP body -> native requests
native_call.py       the native requests of one HTTP request, and the connections of tenants
openai_response.py   native answers and frames -> OpenAI's
openapi.py           the OpenAPI document
errors.py            typed errors in the shape of the OpenAI API
health.py            whether a request would succeed now
"""
