// OpenAI's own library for Node as its users call it. Prints one JSON object: what each case saw, or how it failed.
// Usage: node run.mjs BASE_URL KEY MODEL EMBEDDING_MODEL
import OpenAI from "openai";

const [baseURL, apiKey, model, embeddingModel] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "How far is the moon?" }];
const request = { model, messages, temperature: 0, max_tokens: 200 };
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ type: "function", function: { name: "forecast", parameters } }];

async function collect(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

const textOf = (chunks) => chunks.map((chunk) => chunk.choices[0].delta.content ?? "").join("");

async function refusal(call) {
  try {
    await call();
  } catch (error) {
    const { status, code, param, requestID } = error;
    return { kind: error.constructor.name, status, code, param, requestID };
  }
  return null;
}

const cases = {
  async whole() {
    const { data, response, request_id } = await client.chat.completions.create(request).withResponse();
    return { text: data.choices[0].message.content, requestID: request_id, header: response.headers.get("x-request-id") };
  },
  async stream() {
    const chunks = await collect(await client.chat.completions.create({ ...request, stream: true }));
    return { text: textOf(chunks), count: chunks.length };
  },
  async usage() {
    const options = { stream: true, stream_options: { include_usage: true } };
    const chunks = await collect(await client.chat.completions.create({ ...request, ...options }));
    const last = chunks.at(-1);
    return { choices: last.choices.length, total: last.usage.total_tokens, earlier: chunks.slice(0, -1).every((c) => c.choices.length) };
  },
  async helper() {
    const stream = client.chat.completions.stream(request);
    return { text: await stream.finalContent() };
  },
  async left() {
    const endless = { ...request, max_tokens: 4000, ignore_eos: true, stream: true };
    const stream = await client.chat.completions.create(endless);
    for await (const _ of stream) break;
    return { aborted: stream.controller.signal.aborted };
  },
  async aborted() {
    const endless = { ...request, max_tokens: 4000, ignore_eos: true };
    const controller = new AbortController();
    const answer = refusal(() => client.chat.completions.create(endless, { signal: controller.signal }));
    setTimeout(() => controller.abort(), 100);
    return await answer;
  },
  async tools() {
    const called = await client.chat.completions.create({ ...request, tools });
    const message = called.choices[0].message;
    const result = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
    const answered = await client.chat.completions.create({ ...request, tools, messages: [...messages, message, result] });
    return {
      reason: called.choices[0].finish_reason,
      city: JSON.parse(message.tool_calls[0].function.arguments).city,
      text: answered.choices[0].message.content,
    };
  },
  async streamedTools() {
    const chunks = await collect(await client.chat.completions.create({ ...request, tools, stream: true }));
    const parts = chunks.flatMap((chunk) => chunk.choices[0].delta.tool_calls ?? []);
    const text = parts.map((part) => part.function.arguments ?? "").join("");
    return { name: parts[0].function.name, city: JSON.parse(text).city, reason: chunks.at(-1).choices[0].finish_reason };
  },
  async models() {
    const listed = await collect(client.models.list());
    return { listed: listed.map(({ id }) => id), found: (await client.models.retrieve(model)).id };
  },
  async responses() {
    const input = { model, input: "How far is the moon?", temperature: 0, max_output_tokens: 200, store: false };
    const whole = await client.responses.create(input);
    const events = await collect(await client.responses.create({ ...input, stream: true }));
    const deltas = events.filter(({ type }) => type === "response.output_text.delta");
    return { whole: whole.output_text, streamed: deltas.map(({ delta }) => delta).join(""), last: events.at(-1).type };
  },
  async embeddings() {
    const { data } = await client.embeddings.create({ model: embeddingModel, input: ["one", "two"] });
    return { indices: data.map(({ index }) => index), numbers: data.every(({ embedding }) => embedding.every(Number.isFinite)) };
  },
  async badRequest() {
    return await refusal(() => client.chat.completions.create({ ...request, functions: [{ name: "f" }], stream: true }));
  },
  async unknownModel() {
    return await refusal(() => client.chat.completions.create({ ...request, model: "absent" }));
  },
  async wrongKey() {
    const stranger = new OpenAI({ baseURL, apiKey: "sk-wrong", maxRetries: 0 });
    return await refusal(() => stranger.chat.completions.create(request));
  },
};

const seen = {};
for (const [name, run] of Object.entries(cases)) {
  try {
    seen[name] = { seen: await run() };
  } catch (error) {
    seen[name] = { failed: `${error.constructor.name}: ${error.message}` };
  }
}
console.log(JSON.stringify(seen));
