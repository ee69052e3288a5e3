// The last requests, those that run among them, and where the time of the chosen one went.

import { load } from "./api.js";
import { bar, cells, copyButton, count, find, keep, make, ms, put } from "./dom.js";

const SHOWN = 25;
let chosen; // the id, and the tenant if it is known
let traced = ""; // the request whose trace is shown, and whether it ran

const keyOf = (request) => `${request.tenant} ${request.request_id}`;
const isChosen = (request) => request.request_id === chosen?.id && (chosen.tenant ?? request.tenant) === request.tenant;

export async function requests() {
  let list;
  try {
    list = (await load("/requests")).requests;
  } catch (error) {
    put(find("refused"), error.message);
    return;
  }
  put(find("refused"), list.length ? "" : "No requests yet.");
  chosen ??= list[0] && { id: list[0].request_id };
  const shown = list.filter((request, i) => i < SHOWN || request.running || isChosen(request));
  keep(find("recent"), shown, keyOf, newRow, drawRow);
  if (chosen) await trace(list.find(isChosen));
}

export async function choose(id, tenant = undefined) {
  chosen = { id, tenant };
  const lines = [...find("recent").rows];
  lines.forEach(mark);
  const known = lines.map((line) => line.request).find(isChosen);
  await (known ? trace(known) : requests());
  find("trace").scrollIntoView({ block: "nearest" });
}

function newRow() {
  const line = make("tr");
  line.tabIndex = 0;
  line.addEventListener("click", () => choose(line.request.request_id, line.request.tenant));
  line.addEventListener("keydown", (event) => {
    const beside = { ArrowDown: line.nextElementSibling, ArrowUp: line.previousElementSibling };
    if (event.key === "Enter" || event.key === " ") line.click();
    else if (event.key in beside) beside[event.key]?.focus();
    else return;
    event.preventDefault();
  });
  return line;
}

function drawRow(line, request) {
  line.request = request;
  const { prompt_tokens: read, completion_tokens: written } = request;
  const state = request.running ? "running" : [request.status, request.message].filter(Boolean).join(" ");
  const tokens = read === undefined ? "" : `${count(read)} → ${count(written)}`;
  const when = new Date(request.time).toLocaleTimeString([], { hour12: false });
  const times = [ms(request.first_chunk_ms), ms(request.duration_ms)];
  cells(line, when, request.request_id, request.tenant, null, tokens, ...times);
  put(line.cells[3].firstElementChild ?? line.cells[3].appendChild(make("span")), state);
  line.cells[3].className = request.running ? "busy" : toneOf(request);
  mark(line);
}

function toneOf({ error, status }) {
  if (error === "cancelled") return "dim"; // its client has left: no fault
  return error || status >= 400 ? "bad" : "good";
}

function mark(line) {
  const is = isChosen(line.request);
  line.classList.toggle("chosen", is);
  line.ariaSelected = String(is);
}

// ---- one of them -------------------------------------------------------------------------------------------------

async function trace(request) {
  if (!request) {
    find("trace").replaceChildren(make("p", `${chosen.id} is not among the last requests of this gateway.`, "note"));
    traced = "";
    return;
  }
  const { request_id: id, tenant, running, message } = request;
  const state = `${keyOf(request)} ${running}`;
  if (traced === state && !running) return; // it stays as it is
  if (traced !== state) {
    const head = make("h2", "", "id");
    head.append(make("span", id), " ", copyButton(() => id));
    find("trace").replaceChildren(head, make("p", message, "bad"), make("div"));
    traced = state;
  }
  const drawn = find("trace").lastChild;
  try {
    const { spans } = await load(`/requests/${encodeURIComponent(id)}?tenant=${encodeURIComponent(tenant)}`);
    drawn.replaceChildren(...timeline(spans));
  } catch (error) {
    if (!message && !running) drawn.replaceChildren(make("p", error.message, "note"));
  }
}

function timeline([root, ...spans]) {
  if (!root) return [];
  const all_us = Math.max(root.end_us - root.start_us, 1);
  const rows = spans
    .sort((a, b) => a.start_us - b.start_us)
    .map((span) => {
      const took_us = span.end_us - span.start_us;
      const line = make("div", "", span.name === "preempt" || span.name === "pause" ? "span pause" : "span");
      line.append(make("span", span.name), bar(took_us / all_us, (span.start_us - root.start_us) / all_us), make("span", ms(took_us / 1000), "time"));
      return line;
    });
  const list = make("ol", "", "words");
  for (const event of root.events) list.append(make("li", `${ms((event.at_us - root.start_us) / 1000)}: ${words(event)}`));
  return [...rows, list];
}

// A decision of the scheduler, in words.
function words({ name, attributes: a }) {
  switch (name) {
    case "admit":
      return `Admitted: ${count(a.hit_tokens)} tokens of the prompt were in the prefix cache; ${count(a.free)} blocks stayed free.`;
    case "preempt":
      return (
        `Paused: the KV cache was full, and this request was chosen. ${count(a.freed_blocks)} of its ${count(a.blocks)} blocks were freed` +
        (a.below_blocks ? `, ${count(a.below_blocks)} of them have a copy in a lower tier` : "") +
        `. Loading them back was expected to take ${ms((a.reload_us ?? 0) / 1000)}, computing them again ${ms((a.recompute_us ?? 0) / 1000)}.`
      );
    case "resume":
      return `Resumed: ${count(a.hit_tokens)} tokens were still in the KV cache, ${count(a.recompute_tokens)} are computed again or loaded.`;
    default:
      return `${name}: ${a.why ?? ""}`;
  }
}
