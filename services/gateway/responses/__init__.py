"""Streams of the Responses API; shared/openai/responses/ has requests and whole answers.

events.py    native frames -> the events of one stream, from the beginning or from a number on
"""
