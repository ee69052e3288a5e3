"""Rows with a grammar on the torch engine: device-fed beside free rows, which do not notice."""

from __future__ import annotations

import json

import jsonschema
from support.default_model import default_engine, greedy_cases, model_path
from support.executor.plan_maker import GREEDY, PlanMaker
from support.structured import grammar_of

from shared.answer_formats.grammar import packed, whole
from shared.messages import Sampling, ints
from shared.vocab.files import ModelFiles
from shared.vocab.vocabulary import load_vocabulary

STOP = ints([2])
STEPS = 30
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
}

WRONG = packed(whole(None, {"text": "nothing"}, thinking=False))


def test_structured_and_free_rows_in_one_batch() -> None:
    maker = PlanMaker(default_engine())
    vocabulary = load_vocabulary(ModelFiles("m", model_path()))
    case = greedy_cases()[0]
    grammar = grammar_of({"structured_outputs": {"json": SCHEMA}})
    maker.open(0, case.prompt, GREEDY, stop_ids=STOP)
    maker.open(1, case.prompt, GREEDY, stop_ids=STOP, grammar=grammar)
    maker.open(2, case.prompt, Sampling(temperature=1.0), seed=3, stop_ids=STOP, grammar=grammar)
    maker.open(3, case.prompt, GREEDY, stop_ids=STOP, grammar=WRONG)
    first = maker.prefill(dict.fromkeys(range(4), len(case.prompt)))
    ((row, why),) = first.row_errors
    assert (row, first.ids[3], first.done[3]) == (3, -1, 2)
    assert why.startswith("refused: grammar: ")
    assert 'unknown name: "nothing"' in why
    more = maker.decode(dict.fromkeys(range(3), len(case.prompt) + 1), STEPS)
    ids = {slot: [first.ids[slot], *more[slot]] for slot in range(3)}
    length = min(len(case.output), STEPS + 1)
    assert ids[0][:length] == case.output[:length]
    for slot in (1, 2):
        ended = ids[slot].index(STOP[0])
        text = vocabulary.decode(ids[slot][:ended])
        jsonschema.validate(json.loads(text), SCHEMA)
        assert set(ids[slot][ended + 1 :]) <= {-1}
    assert ids[1] != ids[2]
