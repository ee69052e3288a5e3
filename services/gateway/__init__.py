"""Gateway: HTTP in the OpenAI API's shapes to and from the native protocol. A translation, nothing more.

actor.py             the process: uvicorn and a native client
app.py               routes, and the edge around every request
routes.py            the endpoints that ask a model, and the API keys
connection.py        one connection: what its peer owes, and for how long
exchange.py          one HTTP request from its first byte to its last, and the counts of all
openai_request.py    from an HTTP body to native requests
native_call.py       the native requests of one HTTP request, and the connections they take
openai_response.py   from native answers and frames to OpenAI's
openapi.py           the OpenAPI document
errors.py            typed errors as the OpenAI API says them
health.py            would a request succeed now?
"""
