#!/usr/bin/env node
// node generate.mjs HOST:PORT PROMPT [MAX_TOKENS]: text from a running server, as it is made.

import { Client, explain } from "./antiphon.mjs";

const [target = "localhost:50051", text = "", maxTokens = "100"] = process.argv.slice(2);
const client = new Client(target, { apiKey: process.env.ANTIPHON_API_KEY });
try {
  for await (const { event, delta, finish } of client.stream({ text, maxTokens: Number(maxTokens) })) {
    if (event === "delta") process.stdout.write(delta.text);
    if (event === "finish") {
      const { completionTokens } = finish.usage;
      console.error(`\n${finish.reason}, ${completionTokens} tokens`);
    }
  }
} catch (error) {
  console.error(explain(error));
  process.exitCode = 1;
} finally {
  client.close();
}
