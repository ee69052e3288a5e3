// The page at "/": chat, the fleet's state, the last requests. Everything from a service is shown as text.
"use strict";

const REFRESH_MS = 2000;
const KEY = "headrace-key";
const find = (id) => document.getElementById(id);
let chosen = "";

// A link of `headrace status` brings the key in the fragment, which no server sees.
if (location.hash.startsWith("#key=")) {
  sessionStorage.setItem(KEY, decodeURIComponent(location.hash.slice(5)));
  history.replaceState(null, "", location.pathname);
}

function make(tag, text = "", kind = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

function row(...cells) {
  const line = document.createElement("tr");
  for (const cell of cells) line.append(cell instanceof Node ? cell : make("td", String(cell ?? "")));
  return line;
}

async function call(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  let why = `${answer.status} ${answer.statusText}`;
  try {
    why = (await answer.json()).error.message;
  } catch {
    // not an error of Headrace
  }
  find("sign-in").hidden = find("sign-in").hidden && answer.status !== 401;
  throw Object.assign(new Error(why), { status: answer.status });
}

const load = async (path) => (await call(path)).json();
const ms = (value) => (value === undefined ? "" : value < 1000 ? `${value.toFixed(0)} ms` : `${(value / 1000).toFixed(2)} s`);
const count = (value) => Number(value ?? 0).toLocaleString("en");

function bytes(value) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let i = 0;
  for (; value >= 1000 && i < units.length - 1; i++) value /= 1000;
  return `${value.toFixed(i ? 1 : 0)} ${units[i]}`;
}

// ---- chat ----------------------------------------------------------------------------------------

const talk = [];

function show(role, text) {
  const element = make("p", text, `message ${role}`);
  find("messages").append(element);
  element.scrollIntoView({ block: "end" });
  return element;
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

async function ask(text) {
  talk.push({ role: "user", content: text });
  show("user", text);
  const element = show("assistant", "…");
  const thinking = make("span", "", "thinking");
  const content = document.createTextNode("");
  find("send").disabled = true;
  try {
    const body = JSON.stringify({ model: find("model").value || undefined, messages: talk, stream: true, temperature: 0 });
    const answer = await call("/v1/chat/completions", { method: "POST", body, headers: { "Content-Type": "application/json" } });
    element.replaceChildren(thinking, content);
    for await (const event of events(answer)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta ?? {};
      thinking.textContent += delta.reasoning_content ?? "";
      content.data += delta.content ?? "";
      element.scrollIntoView({ block: "end" });
    }
    talk.push({ role: "assistant", content: content.data });
  } catch (error) {
    talk.pop();
    show("error", error.message);
  } finally {
    find("send").disabled = false;
    refresh();
  }
}

find("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = find("text").value.trim();
  if (!text || find("send").disabled) return;
  find("text").value = "";
  ask(text);
});
find("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    find("ask").requestSubmit();
  }
});
find("new").addEventListener("click", () => {
  talk.length = 0;
  find("messages").replaceChildren();
});
find("sign-in").addEventListener("click", () => {
  const key = prompt("API key (kept in this tab)");
  if (key !== null) sessionStorage.setItem(KEY, key.trim());
  refresh();
});

async function models() {
  const names = (await load("/v1/models")).data.map((model) => model.id);
  const select = find("model");
  if (names.join() === [...select.options].map((option) => option.value).join()) return;
  select.replaceChildren(...names.map((name) => Object.assign(make("option", name), { value: name })));
}

// ---- the fleet -----------------------------------------------------------------------------------

const rate = (state, name) => `${count(Math.round((state.last_10_s?.[name] ?? 0) / (state.last_10_s?.seconds || 1)))}`;
const NOW = {
  gateway: (s) => `${count(s.active)} open, ${count(s.requests)} requests`,
  tokenizer: (s) => `${count(s.pending)} in work, ${rate(s, "prompt_tokens")} tokens/s`,
  scheduler: (s) => `${count(s.running)} running, ${count(s.waiting)} waiting, ${rate(s, "generated")} tokens/s, ${count(s.last_10_s?.preemptions)} preempted`,
  executor: (s) => `${s.model ?? ""} ${s.backend ?? ""} ${s.dtype ?? ""}, ${rate(s, "steps")} steps/s`,
  kv_offload: (s) => `${count(s.tiers?.l1?.entries)} blocks in L1`,
  detokenizer: (s) => `${count(s.sequences)} in work, ${rate(s, "tokens")} tokens/s`,
};

function bar(used, all) {
  const outer = make("div", "", "bar");
  const inner = document.createElement("i");
  inner.style.width = `${all ? Math.min(100, (100 * used) / all) : 0}%`;
  outer.append(inner);
  return outer;
}

function tier(name, used, all, text) {
  const part = document.createElement("div");
  part.append(make("b", name), make("span", ` ${text}`, "dim"), bar(used, all));
  return part;
}

async function fleet() {
  let services;
  try {
    services = (await load("/fleet")).services;
    const order = Object.keys(NOW);
    services.sort((a, b) => order.indexOf(a.kind) - order.indexOf(b.kind) || (a.id < b.id ? -1 : 1));
  } catch (error) {
    find("services").replaceChildren();
    find("tiers").replaceChildren();
    find("problems").textContent = error.status === 403 ? "The state of the fleet needs the operator's key." : error.message;
    return;
  }
  find("services").replaceChildren(
    ...services.map((s) =>
      row(`${s.kind}.${String(s.id).slice(0, 4)}`, make("td", s.state, s.state === "ready" ? "good" : "bad"), NOW[s.kind]?.(s) ?? ""),
    ),
  );
  const bad = services.filter((s) => s.state !== "ready").map((s) => `${s.kind}.${s.id} is ${s.state}`);
  const health = services.find((s) => s.kind === "gateway")?.health;
  if (health && health !== "ok") bad.push(health);
  find("problems").textContent = bad.join("; ");
  const tiers = [];
  for (const scheduler of services.filter((s) => s.kind === "scheduler"))
    for (const [id, e] of Object.entries(scheduler.executors ?? {})) {
      const used = Math.round((e.kv_used_pct * e.blocks) / 100);
      tiers.push(tier("KV cache", used, e.blocks, `of executor ${id.slice(0, 4)}: ${count(used)} of ${count(e.blocks)} blocks in use, ${count(e.cached_blocks)} kept for prefixes`));
    }
  for (const s of services.filter((each) => each.kind === "kv_offload")) {
    const { l1, l2 } = s.tiers ?? {};
    if (l1) tiers.push(tier("L1", l1.used_bytes, l1.capacity_bytes, `DRAM: ${bytes(l1.used_bytes)} of ${bytes(l1.capacity_bytes)}, ${count(l1.entries)} blocks`));
    tiers.push(make("p", s.l2_url ? `L2 ${s.l2_url}: ${l2?.breaker === "closed" ? "connected" : `breaker ${l2?.breaker}`}` : "L2: none", "dim"));
  }
  find("tiers").replaceChildren(...tiers);
}

// ---- requests ------------------------------------------------------------------------------------

async function requests() {
  let list;
  try {
    list = (await load("/requests")).requests;
  } catch (error) {
    find("recent").replaceChildren(row(make("td", error.message, "bad")));
    return;
  }
  find("recent").replaceChildren(
    ...list.slice(0, 12).map((r) => {
      const tokens = r.prompt_tokens === undefined ? "" : `${count(r.prompt_tokens)} → ${count(r.completion_tokens)}`;
      const status = make("td", r.error ? `${r.status} ${r.error}` : r.status, r.status < 400 && !r.error ? "" : "bad");
      const line = row(new Date(r.time).toLocaleTimeString(), r.request_id, r.tenant, status, tokens, ms(r.first_chunk_ms), ms(r.duration_ms));
      line.classList.toggle("chosen", r.request_id === chosen);
      line.addEventListener("click", () => trace(r));
      return line;
    }),
  );
  if (!chosen && list.length) trace(list[0]);
}

// A decision of the scheduler, in words.
function words(event) {
  const a = event.attributes;
  switch (event.name) {
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
      return `${event.name}: ${a.why ?? ""}`;
  }
}

async function trace({ request_id: id, tenant }) {
  chosen = id;
  for (const line of find("recent").rows) line.classList.toggle("chosen", line.cells[1]?.textContent === id);
  let found;
  try {
    found = await load(`/requests/${encodeURIComponent(id)}?tenant=${encodeURIComponent(tenant)}`);
  } catch (error) {
    if (chosen === id) find("trace").replaceChildren(make("p", error.message, "note"));
    return;
  }
  if (chosen !== id || !found.spans?.length) return;
  const [root, ...spans] = found.spans;
  const all = Math.max(root.end_us - root.start_us, 1);
  const rows = spans
    .sort((a, b) => a.start_us - b.start_us)
    .map((span) => {
      const line = make("div", "", span.name === "preempt" || span.name === "pause" ? "span pause" : "span");
      const line_bar = bar(span.end_us - span.start_us, all);
      line_bar.firstChild.style.left = `${(100 * (span.start_us - root.start_us)) / all}%`;
      line.append(make("span", span.name), line_bar, make("span", ms((span.end_us - span.start_us) / 1000), "time"));
      return line;
    });
  const list = make("ol", "", "words");
  for (const event of root.events) list.append(make("li", `${ms((event.at_us - root.start_us) / 1000)}: ${words(event)}`));
  find("trace").replaceChildren(make("h2", `${id}: ${ms(all / 1000)}`), ...rows, list);
}

// ---- every REFRESH_MS ----------------------------------------------------------------------------

async function health() {
  const answer = await fetch("/health");
  const { reason } = await answer.json();
  find("health").textContent = answer.ok ? "ready" : reason;
  find("health").className = `state ${answer.ok ? "good" : "bad"}`;
}

async function refresh() {
  const done = await Promise.allSettled([health(), models(), fleet(), requests()]);
  if (done[0].status === "rejected") {
    find("health").textContent = "the gateway does not answer";
    find("health").className = "state bad";
  }
}

async function forever() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
}

forever();
