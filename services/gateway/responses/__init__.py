"""OpenAI's Responses API, from and to native chats.

request.py   HTTP body -> the fields of a chat, and what the answer repeats of them
output.py    native text -> output items and numbered events; the response object
events.py    native frames -> the events of one stream, from the beginning or from a number on
"""
