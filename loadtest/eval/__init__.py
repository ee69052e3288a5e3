"""How near an engine's logits are to float32's, and its perplexity on a text (docs/guides/accuracy.md).

text.py         a text as windows of tokens, and which of them are scored
engines.py      the engines to compare: settings, each with changes of its own
logits.py       from an engine and windows to logits
divergence.py   from logits to figures
report.py       the table and the JSON          command.py   `headrace eval kl|perplexity`
"""
