// Checks a running server with the unmodified Vercel AI SDK and its provider for servers of OpenAI's API.
//
//     node check_ai_sdk.mjs FOLDER http://127.0.0.1:8000/v1
//
// FOLDER holds the node_modules with ai, @ai-sdk/openai-compatible and zod. Prints one line of JSON per check, {"what",
// "result", "ok"}. The exit status is 1 if a check failed.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import path from "node:path";

const [folder, url] = process.argv.slice(2);
const require = createRequire(path.join(path.resolve(folder), "package.json"));
const { generateObject, generateText, hasToolCall, Output, stepCountIs, streamObject, streamText, tool } = require("ai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

globalThis.AI_SDK_LOG_WARNINGS = false;
const ANSWER_TOKENS = 24;
const CALL_TOKENS = 96;
const SECONDS = 300;
const QUESTION = "Describe a pet that people keep at home.";
const ORDER = "Feed my cat 20 grams of food.";

const [served] = (await (await fetch(`${url}/models`)).json()).data;
// What calls begin with, by the server's name of the format. Other formats have no token of their own.
const CALL_BEGINS = { hermes: "<tool_call>", mistral: "[TOOL_CALLS]" };
const bias = await callBias(CALL_BEGINS[served.capabilities.tools] ?? "");
const provider = createOpenAICompatible({ name: "quire", baseURL: url, supportsStructuredOutputs: true, includeUsage: true });
const given = () => ({
  model: provider(served.id),
  temperature: 0,
  maxRetries: 0,
  maxOutputTokens: CALL_TOKENS,
  abortSignal: AbortSignal.timeout(SECONDS * 1000),
});

const Feed = z.object({ kind: z.enum(["cat", "dog"]), grams: z.number().int() });
const Walk = z.object({ minutes: z.number().int() });
// Zod writes z.record as an object with `propertyNames: {"type": "string"}`.
const Price = z.object({
  currency: z.enum(["euro", "pound", "yen"]),
  prices: z.record(z.string(), z.number()),
});
const PRICES = "Three things and their prices: bread 2, milk 1, tea 4. The currency is the pound.";

// A logit_bias with which the model begins a call where it may choose; undefined if its calls begin with no one token.
// Qwen2.5-Coder, left free, writes its calls as code blocks, which are text.
async function callBias(begin) {
  const body = JSON.stringify({ prompt: begin, add_special_tokens: false });
  const headers = { "Content-Type": "application/json" };
  const answer = await fetch(`${url.replace(/\/v1$/, "")}/tokenize`, { method: "POST", headers, body });
  const { tokens } = await answer.json();
  return tokens.length === 1 ? { [tokens[0]]: 100 } : undefined;
}

function tools({ strict = undefined, runs = false } = {}) {
  const run = runs ? { execute: async () => "Done." } : {};
  return {
    feed: tool({ description: "Feeds a pet.", inputSchema: Feed, strict, ...run }),
    walk: tool({ description: "Walks the dog.", inputSchema: Walk, strict, ...run }),
  };
}

// Returns what was called, or null. Throws if a call breaks the schema of its tool.
function calledTool({ toolCalls, finishReason }, only = undefined) {
  assert.ok(toolCalls.length < 2, JSON.stringify(toolCalls));
  assert.equal(finishReason === "tool-calls", toolCalls.length === 1, finishReason);
  for (const call of toolCalls) {
    assert.ok(!call.invalid && (only === undefined || call.toolName === only), JSON.stringify(call));
    ({ feed: Feed, walk: Walk })[call.toolName].strict().parse(call.input);
    return `${call.toolName}(${JSON.stringify(call.input)})`;
  }
  return null;
}

async function chat() {
  const options = { ...given(), maxOutputTokens: ANSWER_TOKENS, prompt: QUESTION };
  const whole = await generateText(options);
  const stream = streamText({ ...options, onError: () => {} });
  assert.ok(whole.text && ["stop", "length"].includes(whole.finishReason), whole.finishReason);
  assert.equal(await stream.text, whole.text);
  assert.equal(await stream.finishReason, whole.finishReason);
  assert.equal((await stream.usage).outputTokens, whole.usage.outputTokens);
  return `${whole.usage.outputTokens} tokens, the same streamed`;
}

async function called(toolChoice, only, strict) {
  const options = { ...given(), prompt: ORDER, tools: tools({ strict }), toolChoice };
  const isAuto = toolChoice === "auto";
  options.providerOptions = { quire: { parallel_tool_calls: false, ...(isAuto && bias ? { logit_bias: bias } : {}) } };
  const whole = calledTool(await generateText(options), only);
  const stream = streamText({ ...options, onError: () => {} });
  const streamed = { toolCalls: await stream.toolCalls, finishReason: await stream.finishReason };
  assert.equal(calledTool(streamed, only), whole);
  assert.ok(whole !== null || (isAuto && !bias), "no call, although it is required or the bias asks for one");
  return whole === null ? "an answer without a call" : `${whole}, the same streamed`;
}

// The SDK runs the tool and sends its own messages back, then a later turn sends them once more.
async function goesOn() {
  const options = { ...given(), tools: tools({ runs: true }), stopWhen: stepCountIs(2) };
  options.prepareStep = ({ stepNumber }) =>
    ({ toolChoice: stepNumber === 0 ? { type: "tool", toolName: "feed" } : "auto" });
  const asked = { role: "user", content: ORDER };
  const done = await generateText({ ...options, messages: [asked] });
  assert.equal(done.steps.length, 2);
  const said = calledTool(done.steps[0], "feed");
  assert.ok(done.text || done.toolCalls.length, done.finishReason);
  assert.ok(done.steps[1].usage.inputTokens > done.steps[0].usage.totalTokens, "the call was not sent back");
  const thanks = { role: "user", content: "Thank you." };
  const messages = [asked, ...done.response.messages, thanks];
  const more = await generateText({ ...given(), maxOutputTokens: ANSWER_TOKENS, messages });
  assert.ok(more.text);
  return `${said}, then ${JSON.stringify(done.text.slice(0, 40))}`;
}

// A loop of an agent that ends with a tool of its own, as the SDK's documentation writes it.
async function agent() {
  const answer = tool({ description: "Gives the final answer.", inputSchema: z.object({ is_fed: z.boolean() }) });
  const options = { ...given(), tools: { ...tools({ runs: true, strict: true }), answer }, toolChoice: "required" };
  options.stopWhen = [hasToolCall("answer"), stepCountIs(3)];
  options.prepareStep = ({ stepNumber }) => ({ activeTools: stepNumber === 0 ? ["feed", "walk"] : ["answer"] });
  options.providerOptions = { quire: { parallel_tool_calls: false } };
  const done = await generateText({ ...options, prompt: ORDER });
  const [first, last] = done.steps;
  assert.equal(done.steps.length, 2);
  assert.equal(last.toolCalls[0].toolName, "answer");
  assert.equal(typeof last.toolCalls[0].input.is_fed, "boolean");
  return `${calledTool(first)}, then answer(${JSON.stringify(last.toolCalls[0].input)})`;
}

async function object() {
  const options = { ...given(), schema: Price, prompt: PRICES };
  const whole = await generateObject(options);
  const stream = streamObject({ ...options, onError: () => {} });
  let parts = 0;
  for await (const _ of stream.partialObjectStream) parts += 1;
  assert.deepEqual(await stream.object, whole.object);
  assert.ok(parts > 2, `${parts} partial objects`);
  assert.equal(whole.finishReason, "stop");
  return `${JSON.stringify(Price.strict().parse(whole.object))}, the same streamed`;
}

async function output() {
  const done = await generateText({ ...given(), output: Output.object({ schema: Price }), prompt: PRICES });
  return JSON.stringify(Price.strict().parse(done.output));
}

// Arguments with a z.record, in a tool that the model must call.
async function recordTool() {
  const price = tool({ description: "Stores prices.", inputSchema: Price, strict: true });
  const done = await generateText({ ...given(), prompt: PRICES, tools: { price }, toolChoice: "required" });
  const [call] = done.toolCalls;
  assert.ok(done.toolCalls.length >= 1 && !call.invalid, JSON.stringify(done.toolCalls));
  return JSON.stringify(Price.strict().parse(call.input));
}

const checks = [
  ["chat", chat],
  ["required", () => called("required")],
  ["named", () => called({ type: "tool", toolName: "feed" }, "feed")],
  ["auto, strict", () => called("auto", undefined, true)],
  ["calls sent back", goesOn],
  ["agent", agent],
  ["generateObject, z.record", object],
  ["Output.object, z.record", output],
  ["tool, z.record", recordTool],
];

for (const [what, check] of checks) {
  let result;
  let ok = false;
  try {
    result = await check();
    ok = true;
  } catch (error) {
    console.error(error);
    process.exitCode = 1;
    // The body of a refusal has the server's reason.
    result = `${error.name}: ${error.message} ${error.responseBody ?? ""}`.replaceAll("\n", " ").slice(0, 300);
  }
  console.log(JSON.stringify({ what, result, ok }));
}
