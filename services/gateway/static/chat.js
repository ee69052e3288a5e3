// The chats on the page: their list, the one that is open, and the answers that run, each in its own chat.

import { chat as ask, storage } from "./api.js";
import { begin, Chats, end, figuresOf, LEFT, messagesOf, STOPPED, take, titleOf } from "./chats.js";
import { button, copyButton, find, keep, make, put } from "./dom.js";
import { show } from "./markdown.js";

const OPEN = "headrace-open";
const SETTINGS = "headrace-settings";
const DEFAULTS = { model: "", max_tokens: 2048, temperature: "" }; // "": the model's
const DRAW_MS = 50; // 20 a second look continuous
const SAVE_MS = 1000;
const NEAR_PX = 40; // from the end of the conversation, which then stays in sight

const chats = new Chats(storage("localStorage"));
const running = new Map(); // by chat: the turn, and what ends it
let open = chats.get(storage("sessionStorage").getItem(OPEN)) ?? chats.list[0] ?? chats.create();
let follow = true; // until a person scrolls up
let left = false; // the page is gone, and its answers with it

// `ended` is called after each answer, `traced` with the id of a request that a person asks about.
export function start({ ended, traced }) {
  const text = find("text");
  find("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    submit(ended);
  });
  text.addEventListener("keydown", (event) => {
    // Enter that ends the composition of a character is no Enter; Safari sends that one as key 229
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    submit(ended);
  });
  text.addEventListener("input", () => {
    open.draft = text.value;
    fit();
    keepSoon(open);
  });
  find("stop").addEventListener("click", () => running.get(open)?.abort.abort());
  find("new").addEventListener("click", () => choose(chats.create()));
  find("clear").addEventListener("click", clear);
  find("latest").addEventListener("click", () => {
    follow = true;
    toEnd();
  });
  find("messages").addEventListener("scroll", () => {
    const { scrollHeight, scrollTop, clientHeight } = find("messages");
    follow = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    find("latest").hidden = follow;
  });
  new ResizeObserver(toEnd).observe(find("turns"));
  new ResizeObserver(toEnd).observe(find("messages"));
  addEventListener("storage", ({ key }) => {
    if (key !== null) chats.read(key, (chat) => running.has(chat));
    if (chats.get(open.id) === open) draw();
    else choose(chats.list[0] ?? chats.create());
  });
  addEventListener("pageshow", () => (left = false));
  addEventListener("pagehide", () => {
    left = true;
    for (const chat of new Set([open, ...running.keys()])) chats.save(chat);
  });
  for (const name of ["max_tokens", "temperature"]) {
    find(name).value = settings()[name];
    find(name).addEventListener("change", () => set(name, find(name)));
  }
  find("model").addEventListener("change", () => set("model", find("model")));
  find("turns").addEventListener("click", ({ target }) => {
    if (target.dataset.act === "trace") traced(target.dataset.id);
    if (target.dataset.act === "again") send(open, ended, open.turns.at(-1));
  });
  choose(open);
}

export function models(names) {
  const select = find("model");
  if (names.join("\n") === [...select.options].map((option) => option.value).join("\n")) return;
  select.replaceChildren(...names.map((name) => Object.assign(make("option", name), { value: name })));
  if (names.includes(settings().model)) select.value = settings().model;
}

// ---- settings ----------------------------------------------------------------------------------------------------

function settings() {
  try {
    return { ...DEFAULTS, ...JSON.parse(storage("localStorage").getItem(SETTINGS)) };
  } catch {
    return DEFAULTS;
  }
}

// A field that is empty or wrong has its default again.
function set(name, field) {
  if (!field.value || !field.checkValidity()) field.value = DEFAULTS[name];
  const value = field.type === "number" && field.value ? Number(field.value) : field.value;
  try {
    storage("localStorage").setItem(SETTINGS, JSON.stringify({ ...settings(), [name]: value }));
  } catch {
    // it holds until the page is left
  }
}

function bodyOf(chat) {
  return {
    model: find("model").value || undefined,
    messages: messagesOf(chat),
    max_tokens: Number(find("max_tokens").value),
    temperature: find("temperature").value === "" ? undefined : Number(find("temperature").value),
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}

// ---- questions and answers ---------------------------------------------------------------------------------------

function submit(ended) {
  const text = open.draft.trim();
  if (!text || running.has(open)) return;
  open.draft = "";
  send(open, ended, undefined, text);
}

// Ask `question`, or that of the turn `before` again, which stays if there is no other answer.
async function send(chat, ended, before, question = before.question) {
  if (before) chat.turns.pop();
  const turn = begin(chat, question);
  const run = { turn, abort: new AbortController(), sent_ms: performance.now() };
  running.set(chat, run);
  follow = true;
  if (!before) chats.save(chat);
  draw();
  let why = "";
  try {
    for await (const chunk of ask(bodyOf(chat), run.abort.signal)) {
      take(turn, chunk, performance.now() - run.sent_ms);
      keepSoon(chat);
      drawSoon();
    }
  } catch (error) {
    why = run.abort.signal.aborted ? STOPPED : left ? LEFT : error.message;
  }
  running.delete(chat);
  end(chat, turn, why, { stopped: why === STOPPED, before });
  chats.save(chat);
  draw();
  ended();
}

function choose(chat) {
  open = chat;
  follow = true;
  document.body.classList.remove("side-open");
  try {
    storage("sessionStorage").setItem(OPEN, chat.id);
  } catch {
    // the newest chat is open next time
  }
  draw();
  toEnd();
  if (matchMedia("(pointer: fine)").matches) find("text").focus(); // elsewhere a keyboard would cover the chat
}

function remove(chat) {
  running.get(chat)?.abort.abort();
  chats.remove(chat);
  choose(chat === open ? (chats.list[0] ?? chats.create()) : open);
}

function clear() {
  if (!confirm("Clear all chats of this browser?")) return;
  for (const { abort } of running.values()) abort.abort();
  chats.clear();
  choose(chats.create());
}

// ---- drawing -----------------------------------------------------------------------------------------------------

const due = new Map(); // timers of chats that are to be kept
let drawing = false;
let dirty = false;

function keepSoon(chat) {
  if (due.has(chat)) return;
  const keepNow = () => {
    due.delete(chat);
    chats.save(chat);
  };
  due.set(chat, setTimeout(keepNow, SAVE_MS));
}

function drawSoon() {
  dirty = true;
  if (drawing) return;
  drawing = true;
  setTimeout(drawDue);
}

// What takes long to draw is drawn less often, so that the page stays free.
function drawDue() {
  drawing = dirty;
  if (!dirty) return;
  dirty = false;
  const began_ms = performance.now();
  draw();
  setTimeout(drawDue, Math.max(DRAW_MS, 4 * (performance.now() - began_ms)));
}

function draw() {
  const busy = running.has(open);
  keep(find("chats"), chats.list, (chat) => chat.id, newEntry, drawEntry);
  keep(find("turns"), open.turns, (turn) => `${open.id} ${open.turns.indexOf(turn)}`, newTurn, drawTurn);
  find("messages").ariaBusy = String(busy);
  find("welcome").hidden = open.turns.length > 0;
  put(find("problem"), open.error || chats.problem);
  find("send").hidden = busy;
  find("stop").hidden = !busy;
  const text = find("text");
  if (text.value !== open.draft) {
    text.value = open.draft;
    fit();
  }
}

function newEntry(chat) {
  const entry = make("li");
  const chosen = button("", () => choose(chat), "chat");
  const gone = button("×", () => remove(chat), "quiet");
  entry.append(chosen, gone);
  return entry;
}

function drawEntry(entry, chat) {
  const [chosen, gone] = entry.children;
  put(chosen, titleOf(chat));
  chosen.classList.toggle("busy", running.has(chat));
  chosen.ariaCurrent = String(chat === open);
  gone.ariaLabel = `Delete the chat: ${titleOf(chat)}`;
}

function newTurn(turn) {
  const element = make("article", "", "turn");
  const thinking = make("details", "", "thinking");
  const foot = make("div", "", "foot");
  thinking.open = turn.running;
  thinking.append(make("summary", "Thinking"), make("div"));
  foot.append(make("span"), copyButton(() => element.turn.answer), act("Try again", "again"), act("Timeline", "trace"));
  element.append(make("div", "", "question"), thinking, make("div", "", "answer"), make("p", "", "note"), foot);
  return element;
}

function act(text, name) {
  const element = button(text, () => {}, "quiet");
  element.dataset.act = name;
  return element;
}

function drawTurn(element, turn) {
  const [question, thinking, answer, note, foot] = element.children;
  const [figures, copy, again, trace] = foot.children;
  element.turn = turn;
  put(question, turn.question);
  thinking.hidden = !turn.thinking;
  put(thinking.lastChild, turn.thinking);
  answer.classList.toggle("waiting", turn.running && !turn.answer);
  if (element.shown !== turn.answer) show(answer, turn.answer);
  element.shown = turn.answer;
  put(note, turn.note);
  put(figures, figuresOf(turn));
  foot.hidden = turn.running && !turn.figures.tokens;
  copy.hidden = !turn.answer;
  again.hidden = turn !== open.turns.at(-1) || turn.running;
  trace.hidden = !turn.id;
  trace.dataset.id = turn.id;
}

function fit() {
  const text = find("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight}px`;
}

function toEnd() {
  const box = find("messages");
  if (follow) box.scrollTop = box.scrollHeight;
}
