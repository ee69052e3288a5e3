// The page at "/": two views, a chat and the fleet, and what of them is refreshed. What comes from a service is
// shown as text; a model's Markdown is made of elements by markdown.js.

import { load, useKey } from "./api.js";
import * as chat from "./chat.js";
import { find, put } from "./dom.js";
import { fleet } from "./fleet.js";
import { choose, requests } from "./requests.js";

const REFRESH_MS = 2000;

// A link of `headrace status` brings the key in the fragment, which no server sees.
if (location.hash.startsWith("#key=")) {
  useKey(decodeURIComponent(location.hash.slice(5)));
  history.replaceState(null, "", location.pathname);
}

const inFleet = () => location.hash === "#fleet";

function view() {
  find("chat").hidden = inFleet();
  find("fleet").hidden = !inFleet();
  find("to-chat").ariaCurrent = String(!inFleet());
  find("to-fleet").ariaCurrent = String(inFleet());
  return refresh();
}

async function health() {
  const answer = await fetch("/health");
  const { reason } = await answer.json();
  put(find("health"), answer.ok ? "ready" : reason);
  find("health").className = `state ${answer.ok ? "good" : "bad"}`;
}

async function models() {
  chat.models((await load("/v1/models")).data.map((model) => model.id));
}

async function refresh() {
  const [healthy, ...others] = await Promise.allSettled([health(), models(), ...(inFleet() ? [fleet(), requests()] : [])]);
  if (healthy.status === "rejected") {
    put(find("health"), "the gateway does not answer");
    find("health").className = "state bad";
  }
  if (others.some((each) => each.reason?.status === 401)) find("sign-in").hidden = false;
}

async function forever() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((resolve) => setTimeout(resolve, REFRESH_MS));
  }
}

find("sign-in").addEventListener("click", () => {
  const key = prompt("API key (kept in this tab)");
  if (key !== null) useKey(key);
  refresh();
});
find("side-toggle").addEventListener("click", ({ currentTarget }) => {
  currentTarget.ariaExpanded = String(document.body.classList.toggle("side-open"));
});
addEventListener("hashchange", view);
chat.start({
  ended: refresh,
  traced: (id) => {
    location.hash = "#fleet";
    choose(id);
  },
});
view();
forever();
