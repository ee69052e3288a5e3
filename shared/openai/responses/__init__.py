"""OpenAI's Responses API, from and to native chats.

request.py   the fields of a response -> those of a chat, and what the answer repeats of them
output.py    native text -> output items and numbered events; the response object
"""
