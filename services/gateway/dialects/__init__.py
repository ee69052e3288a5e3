"""APIs beside the plain one of OpenAI, each a Part (openapi.py) that the table in app.py names.

anthropic.py   Anthropic's Messages API, from and to OpenAI's shapes
ollama.py      ollama's API, from and to OpenAI's shapes
responses.py   OpenAI's Responses API; shared/openai/responses/ has requests and whole answers
adapters.py    LoRA adapters, as vLLM has them
later.py       chats and completions that are sent now and read later
"""
