// The chats of this browser: what a conversation is, and where it is kept. Nothing here touches the page.
//
// A chat has turns; a turn is a question and what there is of its answer. Each chat has a key of its own in the
// browser's storage, so two tabs do not overwrite each other's.

import { count, ms } from "./dom.js";

const PREFIX = "headrace-chat-";
const TITLE_CHARS = 60;
export const LEFT = "The page was left before the answer ended.";
export const STOPPED = "Stopped.";
export const CUT = "The answer is cut at max tokens: set more, then try again.";
export const NOT_KEPT = "This browser keeps no more chats: its storage is full or off. Clear some.";

export class Chats {
  constructor(storage, now = Date.now) {
    this._storage = storage;
    this._now = now;
    this._all = new Map();
    this.problem = "";
    for (const key of this._keys()) this.read(key);
  }

  // The newest first.
  get list() {
    return [...this._all.values()].sort((a, b) => b.made - a.made);
  }

  get(id) {
    return this._all.get(id);
  }

  // A chat without turns is there once, and is kept from its first text on.
  create() {
    const empty = this.list.find((chat) => !chat.turns.length && !chat.draft);
    if (empty) return empty;
    const made = this._now();
    const chat = { id: `${made.toString(36)}-${Math.random().toString(36).slice(2, 8)}`, made, draft: "", error: "", turns: [] };
    this._all.set(chat.id, chat);
    return chat;
  }

  // Keep a chat; one that was deleted meanwhile stays deleted.
  save(chat) {
    if (this._all.get(chat.id) !== chat) return;
    try {
      this._storage.setItem(PREFIX + chat.id, JSON.stringify(chat));
      this.problem = "";
    } catch {
      this.problem = NOT_KEPT;
    }
  }

  // Take what is under a key: at the start, and when another tab has written it. A chat that `stays` is not replaced.
  read(key, stays = () => false) {
    if (!key.startsWith(PREFIX)) return;
    const id = key.slice(PREFIX.length);
    const chat = valid(id, this._storage.getItem(key));
    const here = this._all.get(id);
    if (here && stays(here)) return;
    if (!chat) this._all.delete(id);
    else if (here) Object.assign(here, chat);
    else this._all.set(id, chat);
  }

  remove(chat) {
    this._all.delete(chat.id);
    this._forget(PREFIX + chat.id);
  }

  clear() {
    this._all.clear();
    for (const key of this._keys()) this._forget(key);
    this.problem = "";
  }

  _keys() {
    try {
      return Object.keys(this._storage).filter((key) => key.startsWith(PREFIX));
    } catch {
      return [];
    }
  }

  _forget(key) {
    try {
      this._storage.removeItem(key);
    } catch {
      // a browser that keeps nothing
    }
  }
}

// A chat as it was kept, or nothing if the text is another program's.
function valid(id, text) {
  try {
    const { made = 0, draft = "", error = "", turns } = JSON.parse(text);
    const chat = { id, made: Number(made), draft: String(draft), error: String(error), turns: turns.map(turnOf) };
    for (const turn of chat.turns) if (turn.running) Object.assign(turn, { running: false, note: LEFT });
    return chat;
  } catch {
    return undefined;
  }
}

function turnOf(kept = {}) {
  const { question = "", answer = "", thinking = "", note = "", id = "", running = false, figures } = kept;
  return { question, answer, thinking, note, id, running, figures: figures ?? {} };
}

export const titleOf = (chat) => (chat.turns[0]?.question || chat.draft || "New chat").trim().slice(0, TITLE_CHARS);

// ---- one answer ------------------------------------------------------------------------------------------------

export function begin(chat, question) {
  const turn = turnOf({ question, running: true });
  chat.turns.push(turn);
  chat.error = "";
  return turn;
}

// The messages of a request for the last turn.
export function messagesOf(chat) {
  const messages = chat.turns.flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.answer },
  ]);
  return messages.slice(0, -1);
}

// Add a chunk that came `at_ms` after the question was sent.
export function take(turn, chunk, at_ms) {
  const { figures } = turn;
  const [choice] = chunk.choices;
  const tokens = chunk.usage?.completion_tokens ?? figures.tokens ?? 0;
  turn.id = chunk.id ?? turn.id;
  if (choice) {
    turn.thinking += choice.delta?.reasoning_content ?? "";
    turn.answer += choice.delta?.content ?? "";
    if (choice.finish_reason === "length") turn.note = CUT;
  }
  figures.tokens = tokens;
  if (tokens && figures.first_ms === undefined) Object.assign(figures, { first_ms: at_ms, first_tokens: tokens });
  if (choice && tokens) figures.last_ms = at_ms;
}

// End a turn, because of an error or a stop unless `why` is empty. The answer so far stays. A turn without any gives
// its place back to the one that it asked again, or else its text to the draft.
export function end(chat, turn, why = "", { stopped = false, before = undefined } = {}) {
  turn.running = false;
  if (!why) return;
  if (turn.answer || turn.thinking) {
    turn.note = why;
    return;
  }
  chat.turns.splice(chat.turns.indexOf(turn), 1, ...(before ? [before] : []));
  if (!before) chat.draft = [turn.question, chat.draft].filter(Boolean).join("\n");
  chat.error = stopped ? "" : why;
}

export function figuresOf({ figures }) {
  const { tokens, first_ms, last_ms, first_tokens } = figures;
  const shown = [];
  if (tokens) shown.push(`${count(tokens)} token${tokens === 1 ? "" : "s"}`);
  if (last_ms > first_ms && tokens > first_tokens) {
    shown.push(`${((1000 * (tokens - first_tokens)) / (last_ms - first_ms)).toFixed(1)} tokens/s`);
  }
  if (first_ms !== undefined) shown.push(`first token after ${ms(first_ms)}`);
  return shown.join(" · ");
}
