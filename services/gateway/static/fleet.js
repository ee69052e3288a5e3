// The state of the fleet: its services, what each KV tier holds, and the sessions of the one who looks.

import { load } from "./api.js";
import { bar, bytes, cells, count, find, keep, make, ms, put } from "./dom.js";

const MOST_SESSIONS = 30;

const l1_of = (state) => (state.tiers?.l1?.capacity_bytes ? state.tiers.l1 : undefined);
const KINDS = ["gateway", "tokenizer", "scheduler", "executor", "kv_offload", "detokenizer", "keeper"];

export async function fleet() {
  let services = [];
  let problems = [];
  try {
    services = (await load("/fleet")).services;
    problems = services.filter((s) => s.state !== "ready").map((s) => `${s.kind}.${s.id} is ${s.state}`);
    const health = services.find((s) => s.kind === "gateway")?.health;
    if (health && health !== "ok") problems.push(health);
  } catch (error) {
    problems = [error.status === 403 ? "The state of the fleet needs the operator's key." : error.message];
    if (error.lost) services = null; // the last state stays, the problem is named
  }
  put(find("problems"), problems.join("; "));
  if (services === null) return;
  const order = (s) => (KINDS.includes(s.kind) ? KINDS.indexOf(s.kind) : Infinity);
  services.sort((a, b) => order(a) - order(b) || (a.id < b.id ? -1 : 1));
  keep(find("services"), services, (s) => `${s.kind}.${s.id}`, () => make("tr"), drawService);
  const tiers = services.flatMap(tiersOf);
  find("tiers-head").hidden = !tiers.length;
  keep(find("tiers"), tiers, (tier) => tier.key, newTier, drawTier);
  await sessions();
}

async function sessions() {
  let rows = [];
  try {
    rows = (await load("/v1/sessions")).data;
  } catch (error) {
    if (error.lost) return; // the last ones stay
  }
  find("sessions-part").hidden = !rows.length;
  keep(find("sessions"), rows.slice(0, MOST_SESSIONS), (row) => row.session, () => make("tr"), drawSession);
}

// Red: the next turn computes what no tier has, or what no tier has soon enough.
export function drawSession(line, row) {
  const computes = row.compute_s !== undefined && !(row.load_s < row.compute_s);
  const next = computes ? `computed ${ms(row.compute_s * 1e3)}` : row.load_s ? `loaded ${ms(row.load_s * 1e3)}` : "";
  const idle = row.idle_s === undefined ? "" : ms(row.idle_s * 1e3);
  cells(line, `…${row.session.slice(-4)}${row.tool ? ` (${row.tool})` : ""}`, row.state, idle, count(row.tokens), next);
  line.className = computes ? "bad" : "";
}

function drawService(line, s) {
  cells(line, `${s.kind}.${String(s.id).slice(0, 4)}`, s.state, [s.model, ...(s.cells ?? [])].filter(Boolean).join(", "));
  line.cells[1].className = s.state === "ready" ? "good" : "bad";
}

// The tiers that a service has: a scheduler those of its executors, a kv_offload L1 and L2, if there is one.
function tiersOf(s) {
  if (s.kind === "scheduler") {
    return Object.entries(s.executors ?? {}).map(([id, e]) => {
      const used = Math.round((e.kv_used_pct * e.blocks) / 100);
      const text = `of executor ${id.slice(0, 4)}: ${count(used)} of ${count(e.blocks)} blocks in use, ${count(e.cached_blocks)} kept for prefixes`;
      return { key: `kv ${id}`, name: "KV cache", text, part: e.blocks ? used / e.blocks : 0 };
    });
  }
  const found = [];
  const l1 = l1_of(s);
  if (l1) {
    const text = `DRAM: ${bytes(l1.used_bytes)} of ${bytes(l1.capacity_bytes)}, ${count(l1.entries)} blocks`;
    found.push({ key: `l1 ${s.id}`, name: "L1", text, part: l1.used_bytes / l1.capacity_bytes });
  }
  if (s.l2_url) {
    const { breaker } = s.tiers?.l2 ?? {};
    found.push({ key: `l2 ${s.id}`, name: "L2", text: `${s.l2_url}: ${breaker === "closed" ? "connected" : `breaker ${breaker}`}` });
  }
  return found;
}

function newTier({ name, part }) {
  const element = make("div", "", "tier");
  element.append(make("b", name), " ", make("span", "", "dim"), ...(part === undefined ? [] : [bar(part)]));
  return element;
}

function drawTier(element, { text, part }) {
  put(element.children[1], text);
  if (part !== undefined) element.lastChild.firstChild.style.width = `${100 * Math.min(1, part)}%`;
}
