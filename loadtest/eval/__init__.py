"""How close an engine's logits are to float32's, and its perplexity on a text (docs/guides/accuracy.md).

text.py         a text as windows of tokens, and which of them are scored
engines.py      the engines to compare: settings, each with its own changes
llama_cpp.py    llama.cpp as one of them
wider.py        a model again with widths that K-quants need
logits.py       computes the logits of windows with an engine
divergence.py   computes figures from logits
report.py       the table and the JSON          command.py   `headrace eval kl|perplexity`
"""
