"""Compares the greedy answers of engines with those of a reference, over 300 fixed questions.

    python -m loadtest.eval.greedy packed packed8 --out greedy.json

An answer may differ where two tokens are nearly as likely. So the first 16 tokens count where the reference
is sure: where each of them leads the next likeliest one by more than --margin in the logits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import product

import kernels.cpu_jit
from loadtest.command_line import parser_of, report
from loadtest.driver import Driver
from loadtest.eval.engines import SIDE_BY_SIDE, Arm
from loadtest.fleet import cpu_name
from services.executor.engine import Backend
from services.tokenizer.chat_template import ChatTemplate
from shared.config import load
from shared.vocab.files import resolve
from shared.vocab.vocabulary import load_vocabulary

TOKENS, CONTEXT, MARGIN = 16, 512, 0.05
FORMS = (
    "What is the capital of {}?",
    "Tell me one fact about {}.",
    "Which languages are spoken in {}?",
    "Write a short poem about {}.",
    "What do people in {} like to eat?",
    "Is {} larger than Spain? Answer yes or no, and why.",
    "Translate 'good morning from {}' to French.",
    "List three things to see in {}.",
    "What is the weather like in {} in July?",
    "Write a Python function that returns the name '{}'.",
    "Who wrote a famous book about {}?",
    "How do I get from {} to London?",
    "Summarise the history of {} in one sentence.",
    "What is 17 times 3, and where is {}?",
    "Correct this sentence: 'he go to {} yesterday'.",
)
PLACES = (
    "France", "Japan", "Brazil", "Kenya", "Norway", "Peru", "Egypt", "Canada", "India", "Portugal", "Iceland",
    "Vietnam", "Mexico", "Poland", "Morocco", "Chile", "Greece", "Nepal", "Ireland", "Cuba",
)  # fmt: skip


def questions() -> list[str]:
    return [form.format(place) for form, place in product(FORMS, PLACES)]


def prompts(model: str) -> list[list[int]]:
    """The ids of each question as a chat."""
    settings = load(flags={"model": model or None}).settings
    vocabulary = load_vocabulary(resolve(settings.model, settings.cache_dir))
    template = ChatTemplate(vocabulary)
    return [
        template.encode([{"role": "user", "content": question}], None, True, 0) for question in questions()
    ]


Answer = list[tuple[int, float]]  # a token, and by how much its logit leads the next one


def answers(engine: Backend, asked: Sequence[list[int]]) -> Iterator[Answer]:
    """The first tokens of each prompt's greedy answer, by decode steps of some answers at once."""
    for first in range(0, len(asked), SIDE_BY_SIDE):
        group = asked[first : first + SIDE_BY_SIDE]
        driver, found = Driver(engine), [Answer() for _ in group]
        tables = dict(
            driver.open_with(slot, tokens, len(tokens) + TOKENS, logprobs=1)
            for slot, tokens in enumerate(group)
        )  # where log probabilities are asked for, logits come out of every engine
        for step in range(TOKENS):
            rows = [
                (slot, len(group[slot]) + step - 1, 1, True) if step else (slot, 0, len(group[slot]), False)
                for slot in tables
            ]
            for part in [rows] if step else [[row] for row in rows]:
                plan = driver.plan(part, {} if step else {slot: tables[slot] for slot, *_ in part})
                pending = engine.forward(plan)
                assert pending.logits is not None
                highest = pending.logits.float().topk(2)
                engine.sample(pending)
                for (slot, *_), ids, values in zip(part, highest.indices, highest.values, strict=True):
                    found[slot].append((int(ids[0]), float(values[0] - values[1])))
        yield from found
        driver.close()


def main() -> int:
    parser = parser_of("eval.greedy", __doc__)
    parser.add_argument("engines", nargs="*", default=["auto"], help="as for `headrace eval kl`")
    parser.add_argument("--model", default="", help="default: the setting")
    parser.add_argument("--reference", default="f32")
    parser.add_argument("--margin", type=float, default=MARGIN)
    given = parser.parse_args()
    asked = prompts(given.model)

    def ask(arm: str) -> list[Answer]:
        with closing(Arm.read(arm).build(given.model, CONTEXT)) as engine:
            return list(answers(engine, asked))

    wanted = ask(given.reference)
    least = [min(lead for _, lead in answer) for answer in wanted]
    sure = [lead > given.margin for lead in least]
    kind = kernels.cpu_jit.cpu_kind()
    found = {
        "cpu": cpu_name(),
        "kernels": kind.name if kind else "",
        "questions": len(asked),
        "sure": sum(sure),
    }
    wrong = 0
    for arm in given.engines:
        same = [[t for t, _ in one] == [t for t, _ in two] for one, two in zip(wanted, ask(arm), strict=True)]
        lost = [round(lead, 4) for lead, equal in zip(least, same, strict=True) if not equal]
        found[arm] = {"equal": sum(same), "leads_of_the_others": sorted(lost)}
        wrong += sum(lead > given.margin for lead in lost)
        print(f"{arm}: {sum(same)} equal; the least lead of the reference's other answers: {sorted(lost)}")
    report(found, given.out)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
