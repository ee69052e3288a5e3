"""What a chat of the page keeps: through an error, a stop, a reload, another tab, a full storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.page_modules import run

# A browser's storage: its own keys are those that were set.
STORAGE = """
import { begin, Chats, CUT, end, figuresOf, messagesOf, NOT_KEPT, STOPPED, take, titleOf } from "./chats.js";
class Storage {
  getItem(key) { return this[key] ?? null; }
  setItem(key, text) { if (Storage.full) throw new Error("quota"); this[key] = text; }
  removeItem(key) { delete this[key]; }
}
const storage = new Storage();
let made = 100;
const chats = new Chats(storage, () => made++);
const chunk = (text, tokens, more = {}) =>
  ({ id: "r-1", choices: [{ delta: { content: text }, ...more }], usage: { completion_tokens: tokens } });
function ask(chat, question, answer = "") {
  const turn = begin(chat, question);
  if (answer) take(turn, chunk(answer, 1), 10);
  return turn;
}
"""


def found(folder: Path, script: str) -> Any:
    return run(folder, STORAGE + script)


def test_answer_goes_to_the_chat_that_requested_it(tmp_path: Path) -> None:
    script = """
    const one = chats.create();
    const turn = ask(one, "first");
    const two = chats.create();
    take(turn, chunk("an", 1), 5);
    take(turn, chunk("swer", 2), 9);
    end(one, turn);
    report([one.turns.map((t) => [t.question, t.answer, t.running]), two.turns, chats.list.map(titleOf)]);
    """
    assert found(tmp_path, script) == [[["first", "answer", False]], [], ["New chat", "first"]]


def test_request_has_all_messages_except_its_own_answer(tmp_path: Path) -> None:
    script = """
    const chat = chats.create();
    end(chat, ask(chat, "a", "b"));
    ask(chat, "c");
    report(messagesOf(chat));
    """
    assert found(tmp_path, script) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]


@pytest.mark.parametrize("draft", ["", "typed meanwhile"])
def test_an_error_before_an_answer_gives_the_text_back(tmp_path: Path, draft: str) -> None:
    script = f"""
    const chat = chats.create();
    const turn = ask(chat, "my text");
    chat.draft = "{draft}";
    end(chat, turn, "The gateway does not answer.");
    report([chat.turns, chat.draft, chat.error]);
    """
    kept = "\n".join(filter(None, ["my text", draft]))
    assert found(tmp_path, script) == [[], kept, "The gateway does not answer."]


def test_an_answer_so_far_stays_with_the_reason(tmp_path: Path) -> None:
    script = """
    const chat = chats.create();
    end(chat, ask(chat, "q", "so far"), "The connection was lost.");
    report([chat.turns.map((t) => [t.question, t.answer, t.note]), chat.draft, chat.error]);
    """
    assert found(tmp_path, script) == [[["q", "so far", "The connection was lost."]], "", ""]


def test_a_stop_before_an_answer_is_no_error(tmp_path: Path) -> None:
    script = """
    const chat = chats.create();
    end(chat, ask(chat, "q"), STOPPED, { stopped: true });
    report([chat.turns, chat.draft, chat.error]);
    """
    assert found(tmp_path, script) == [[], "q", ""]


@pytest.mark.parametrize(("again", "left"), [("", "the first"), ("the second", "the second")])
def test_repeated_question_loses_no_answer(tmp_path: Path, again: str, left: str) -> None:
    script = f"""
    const chat = chats.create();
    end(chat, ask(chat, "q", "the first"));
    const before = chat.turns.pop();
    end(chat, ask(chat, "q", "{again}"), "lost", {{ before }});
    report([chat.turns.map((t) => t.answer), chat.draft, chat.error]);
    """
    assert found(tmp_path, script) == [[left], "", "" if again else "lost"]


def test_chats_are_there_after_a_reload_until_they_are_cleared(tmp_path: Path) -> None:
    script = """
    const [one, two] = [chats.create(), chats.create()];
    end(one, ask(one, "a", "b"));
    chats.save(one);
    const other = chats.create();
    other.draft = "half a que";
    chats.save(other);
    storage.setItem("another program's", "{");
    const again = new Chats(storage).list.map((chat) => [chat.turns.map((t) => t.answer), chat.draft]);
    chats.clear();
    report([one === two, again, Object.keys(storage), chats.list]);
    """
    kept = [[[], "half a que"], [["b"], ""]]
    assert found(tmp_path, script) == [True, kept, ["another program's"], []]


def test_answer_that_ran_at_a_reload_is_marked(tmp_path: Path) -> None:
    script = """
    const chat = chats.create();
    ask(chat, "q", "half");
    chats.save(chat);
    report(new Chats(storage).list[0].turns.map((t) => [t.answer, t.note, t.running]));
    """
    assert found(tmp_path, script) == [["half", "The page was left before the answer ended.", False]]


def test_two_tabs_keep_each_others_chats(tmp_path: Path) -> None:
    script = """
    const tab = new Chats(storage, () => 50);
    const [mine, theirs] = [chats.create(), tab.create()];
    ask(mine, "mine");
    ask(theirs, "theirs");
    chats.save(mine);
    tab.save(theirs);
    const key = `headrace-chat-${theirs.id}`;
    chats.read(key);
    const seen = chats.list.map(titleOf);
    tab.remove(theirs);
    chats.read(key, () => true);
    const busy = chats.list.length;
    chats.read(key);
    report([seen, busy, chats.list.map(titleOf), new Chats(storage).list.map(titleOf)]);
    """
    assert found(tmp_path, script) == [["mine", "theirs"], 2, ["mine"], ["mine"]]


def test_a_deleted_chat_is_not_kept_again_by_its_answer(tmp_path: Path) -> None:
    script = """
    const chat = chats.create();
    const turn = ask(chat, "q", "a");
    chats.save(chat);
    chats.remove(chat);
    end(chat, turn, STOPPED, { stopped: true });
    chats.save(chat);
    report([chats.list, Object.keys(storage)]);
    """
    assert found(tmp_path, script) == [[], []]


def test_a_storage_that_keeps_nothing_is_named_and_the_chats_go_on(tmp_path: Path) -> None:
    script = """
    Storage.full = true;
    const chat = chats.create();
    end(chat, ask(chat, "q", "a"));
    chats.save(chat);
    const full = [chats.problem === NOT_KEPT, chats.list.map(titleOf)];
    Storage.full = false;
    chats.save(chat);
    const off = new Chats({ getItem() { throw new Error("off"); } });
    report([...full, chats.problem, off.list]);
    """
    assert found(tmp_path, script) == [True, ["q"], "", []]


@pytest.mark.parametrize(
    "text", ["", "{", "null", "[]", '{"turns": 1}', '{"made": 1, "turns": [{"answer": "<b>"}]}', '"x"']
)
def test_another_programs_text_under_our_key_breaks_nothing(tmp_path: Path, text: str) -> None:
    script = f"""
    storage.setItem("headrace-chat-x", {text!r});
    const list = new Chats(storage).list;
    report(list.map((chat) => chat.turns.map((turn) => [turn.question, turn.answer])));
    """
    assert found(tmp_path, script) == ([[["", "<b>"]]] if "made" in text else [])


def test_figures_are_of_what_came(tmp_path: Path) -> None:
    """Two tokens came with the first chunk after 250 ms, the other eight in the second after that."""
    script = """
    const chat = chats.create();
    const turn = begin(chat, "q");
    const before = figuresOf(turn);
    take(turn, { ...chunk("", 0), usage: { completion_tokens: 0 } }, 240);
    take(turn, chunk("ab", 2), 250);
    take(turn, chunk("cd", 10), 1250);
    take(turn, { choices: [], usage: { completion_tokens: 10 } }, 9000);
    const one = begin(chats.create(), "q");
    take(one, chunk("a", 1), 1234.5);
    const cut = begin(chats.create(), "q");
    take(cut, chunk("a", 1, { finish_reason: "length" }), 1);
    report([before, figuresOf(turn), figuresOf(one), cut.note === CUT, turn.note, turn.id]);
    """
    assert found(tmp_path, script) == [
        "",
        "10 tokens · 8.0 tokens/s · first token after 250 ms",
        "1 token · first token after 1.23 s",
        True,
        "",
        "r-1",
    ]


def test_reasoning_is_kept_apart(tmp_path: Path) -> None:
    script = """
    const chat = chats.create();
    const turn = begin(chat, "q");
    take(turn, { choices: [{ delta: { reasoning_content: "hm" } }], usage: { completion_tokens: 1 } }, 1);
    end(chat, turn, STOPPED, { stopped: true });
    report([chat.turns.map((t) => [t.thinking, t.answer, t.note]), chat.draft]);
    """
    assert found(tmp_path, script) == [[["hm", "", "Stopped."]], ""]
