"""How families of models write their reasoning and their calls of functions, and how such answers are read.

The folder has no state and no input or output: `formats.py` is the table, `parser.py` reads an answer,
`notations.py` reads one call, `grammar.py` writes the grammar of an answer.
"""
