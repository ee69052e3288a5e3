// The page at "/docs": each operation of /openapi.json with its fields, and a form to try it. No markup is read.
"use strict";

const KEY = "headrace-key";
const SHOWN_CHARS = 20000; // of an answer
const EXAMPLES = {
  messages: [{ role: "user", content: "Hello" }], prompt: "Hello", tokens: [1, 2], max_tokens: 20,
};
const find = (id) => document.getElementById(id);
let described = {};

function make(tag, text = "", ...children) {
  const element = document.createElement(tag);
  element.textContent = text;
  element.append(...children);
  return element;
}

function resolved(schema) {
  const name = schema?.$ref?.split("/").pop();
  return name ? resolved(described.components.schemas[name]) : schema ?? {};
}

function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf ?? schema.oneOf) return (schema.anyOf ?? schema.oneOf).map(kind).filter((name) => name !== "null").join(" or ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if ("const" in schema) return JSON.stringify(schema.const);
  const bounds = [["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]];
  const shown = bounds.filter(([name]) => name in schema).map(([name, sign]) => ` ${sign} ${schema[name]}`);
  return (schema.type === "array" ? `list of ${kind(schema.items ?? {})}` : [schema.type ?? "any"].flat().join(" or ")) + shown.join("");
}

function fields(schema) {
  const body = make("tbody");
  for (const [name, each] of Object.entries(schema.properties ?? {})) {
    const needed = schema.required?.includes(name) ? " (required)" : "";
    const inner = (each.anyOf ?? []).find((part) => part.description);
    body.append(make("tr", "", make("td", name + needed), make("td", kind(each)), make("td", each.description ?? inner?.description ?? "")));
  }
  return make("table", "", body);
}

async function send(method, path, text, output) {
  const key = find("key").value.trim();
  if (key) sessionStorage.setItem(KEY, key);
  output.textContent = "…";
  try {
    const headers = { ...(text === null ? {} : { "Content-Type": "application/json" }), ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const answer = await fetch(path, { method, headers, body: text });
    output.textContent = `${answer.status}\n${(await answer.text()).slice(0, SHOWN_CHARS)}`;
  } catch (error) {
    output.textContent = String(error);
  }
}

function form(method, path, schema) {
  const address = make("input"), output = make("pre"), button = make("button", "Send");
  address.value = path;
  address.ariaLabel = "path";
  let text = null;
  if (schema) {
    text = make("textarea");
    text.ariaLabel = "body";
    const names = Object.keys((schema.anyOf ? resolved(schema.anyOf[0]) : schema).properties ?? {});
    text.value = JSON.stringify(Object.fromEntries(names.filter((name) => name in EXAMPLES).map((name) => [name, EXAMPLES[name]])), null, 2);
    text.rows = 6;
  }
  button.type = "button";
  button.addEventListener("click", () => send(method, address.value, text && text.value, output));
  return [make("form", "", ...[address, text, button].filter(Boolean)), output];
}

function operation(method, path, about) {
  const bodies = about.requestBody?.content ?? {};
  const json = bodies["application/json"];
  const upload = json ? undefined : Object.values(bodies)[0]; // a form with a file, which is not sent from here
  const schema = (json ?? upload) && resolved((json ?? upload).schema);
  const answers = Object.entries(about.responses).map(([status, each]) => make("li", `${status}: ${each.description}`));
  const shown = schema ? (schema.anyOf ? schema.anyOf.map((part) => fields(resolved(part))) : [fields(schema)]) : [];
  const title = make("summary", "", make("b", `${method} ${path}`), make("span", `  ${about.summary}`));
  return make("details", "", title, ...shown, make("ul", "", ...answers), ...(upload ? [] : form(method, path, schema)));
}

async function start() {
  find("key").value = sessionStorage.getItem(KEY) ?? "";
  described = await (await fetch("/openapi.json")).json();
  find("version").textContent = described.info.version;
  for (const [path, methods] of Object.entries(described.paths)) {
    for (const method of ["get", "post", "delete"].filter((name) => name in methods)) {
      find("operations").append(operation(method.toUpperCase(), path, methods[method]));
    }
  }
}

start().catch((error) => { find("operations").textContent = String(error); });
