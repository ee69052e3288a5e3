"""The gateway translates the OpenAI API over HTTP to and from the native protocol.

actor.py             the process: uvicorn and a native client
app.py               the application: paths, endpoints, API keys, and the middleware around every request
connection.py        one connection, with time limits for its peer
exchange.py          one HTTP request from its first byte to its last, and the counters
native_call.py       the native requests of one HTTP request, the connections of tenants, the state of health
openai_response.py   native answers and frames -> OpenAI's
anthropic.py         Anthropic's Messages API, from and to OpenAI's shapes
ollama.py            ollama's API, from and to OpenAI's shapes
responses/           OpenAI's Responses API
durable/             requests that are answered now and read later
openapi.py           the OpenAPI document
errors.py            typed errors in the shape of the OpenAI API
"""
