// Calls to the gateway. Their errors are sentences for people; `lost` marks those of a connection that ended.

const KEY = "headrace-key";
const NOTHING = { getItem: () => null, setItem: () => { throw new Error("off"); }, removeItem: () => {} };
const NO_ANSWER = "The gateway does not answer. Check that it runs (`headrace status`), then send again.";
const LOST = "The connection to the gateway was lost: the answer ends here.";

// The browser's storage of a kind, which a person may have turned off.
export function storage(kind) {
  try {
    return window[kind] ?? NOTHING;
  } catch {
    return NOTHING;
  }
}

let key = storage("sessionStorage").getItem(KEY) ?? "";

export function useKey(given) {
  key = given.trim();
  try {
    storage("sessionStorage").setItem(KEY, key);
  } catch {
    // it is known until the page is left
  }
}

const lost = (why) => Object.assign(new Error(why), { lost: true });

export async function call(path, options = {}) {
  const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers });
  } catch (error) {
    throw error.name === "AbortError" ? error : lost(NO_ANSWER);
  }
  if (answer.ok) return answer;
  let found = {};
  try {
    found = (await answer.json()).error;
  } catch {
    // no error of Headrace, but of a proxy before it
  }
  const why = found?.message ?? `${answer.status} ${answer.statusText}`;
  throw Object.assign(new Error(why), { status: answer.status, code: found?.code, param: found?.param });
}

export const load = async (path) => (await call(path)).json();

const post = (path, body, signal) =>
  call(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal });

// The chunks of an answer. An answer that may not be as long as `max_tokens`, for want of context, gets what is left.
export async function* chat(body, signal) {
  let answer;
  try {
    answer = await post("/v1/chat/completions", body, signal);
  } catch (error) {
    if (error.code !== "context_length_exceeded" || error.param !== "max_tokens") throw error;
    answer = await post("/v1/chat/completions", { ...body, max_tokens: undefined }, signal);
  }
  yield* events(answer.body);
}

export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : lost(LOST);
    }
    if (part.done) throw lost(LOST);
    const lines = (rest + part.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}
