// pip: openai
// openai-node: chat, stream, tools; responses: plain, stream, background.
import OpenAI from "openai";
import assert from "node:assert";

const client = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "any", maxRetries: 0 });
const model = process.env.MODEL;
const messages = [{ role: "user", content: "What is the capital of France?" }];
const whole = await client.chat.completions.create({ model, messages, max_tokens: 20, temperature: 0 });
assert.match(whole.choices[0].message.content, /Paris/);
let text = "";
for await (const chunk of await client.chat.completions.create({ model, messages, max_tokens: 20, temperature: 0, stream: true }))
  text += chunk.choices[0]?.delta?.content ?? "";
assert.equal(text, whole.choices[0].message.content);
const tools = [{ type: "function", function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string", maxLength: 20 } }, required: ["city"] } } }];
const called = await client.chat.completions.create({ model, messages, tools, tool_choice: "required", max_tokens: 80, temperature: 0 });
assert.equal(called.choices[0].message.tool_calls[0].function.name, "weather");
await assert.rejects(client.chat.completions.create({ model: "none", messages }), { status: 404 });
const input = "What is the capital of France?";
const response = await client.responses.create({ model, input, max_output_tokens: 20, temperature: 0 });
assert.equal(response.output_text, whole.choices[0].message.content);
let events = [];
for await (const event of await client.responses.create({ model, input, max_output_tokens: 20, temperature: 0, background: true, stream: true })) {
  events.push(event);
  if (events.length === 7) break;
}
const last = events.at(-1).sequence_number;
for await (const event of await client.responses.retrieve(events[0].response.id, { stream: true, starting_after: last })) events.push(event);
text = events.filter((e) => e.type === "response.output_text.delta").map((e) => e.delta).join("");
assert.equal(text, response.output_text);
const used = await client.responses.create({ model, input, max_output_tokens: 80, temperature: 0, tool_choice: "required", tools: [{ type: "function", strict: true, ...tools[0].function }] });
assert.equal(used.output[0].name, "weather");
