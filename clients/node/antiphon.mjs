// A client for serve.v1.GenerationService, made from the .proto file when it is loaded: what the
// service can do, this can, under the same names, in camel case.

import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const PROTO = fileURLToPath(
  new URL("../../protos/serve/v1/generation.proto", import.meta.url),
);

// What the server could not take is sent again by gRPC itself, with backoff and jitter; a stream of
// which something has come is not. A server that is loading or draining answers UNAVAILABLE.
const RETRIES = {
  methodConfig: [
    {
      name: [{ service: "serve.v1.GenerationService" }],
      retryPolicy: {
        maxAttempts: 4,
        initialBackoff: "0.25s",
        maxBackoff: "20s",
        backoffMultiplier: 2,
        retryableStatusCodes: ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
      },
    },
  ],
};

/**
 * Talks to one server.
 *
 * options: `proto` (path of generation.proto), `timeout` (seconds for a whole request, 300),
 * `apiKey`, and `tls`: true, or the paths `{ca, certificate, key}` (the last two for mTLS).
 */
export class Client {
  #stub;
  #timeout;
  #apiKey;

  constructor(target = "localhost:50051", options = {}) {
    const definition = protoLoader.loadSync(options.proto ?? PROTO, {
      enums: String, // a finish reason is its name
      longs: Number, // a seed above 2^53 loses digits; String keeps them
      oneofs: true, // an event's `event` says which of its fields is set
      defaults: true,
    });
    const { GenerationService } = grpc.loadPackageDefinition(definition).serve.v1;
    this.#stub = new GenerationService(target, credentials(options.tls), {
      "grpc.service_config": JSON.stringify(RETRIES),
      "grpc.max_receive_message_length": 256 * 2 ** 20,
    });
    this.#timeout = options.timeout ?? 300;
    this.#apiKey = options.apiKey;
  }

  /** A whole text: `{prompt, choices}`. `spec` has the fields of GenerationSpec. */
  generate(spec, call = {}) {
    return this.#unary("generate", { spec }, call);
  }

  /** An async iterator over what comes: `{event: "prompt" | "delta" | "finish", …}`.
   * Leaving the loop tells the server to stop. */
  async *stream(spec, call = {}) {
    const stream = this.#stub.generateStream({ spec }, ...this.#about(call));
    stream.on("error", () => {}); // whoever reads is told; who has left need not be
    try {
      yield* stream;
    } finally {
      stream.cancel();
    }
  }

  /** An async iterator over results as they are done: `{index, outcome, completion | failure}`. */
  async *batch(specs, call = {}) {
    const stream = this.#stub.batchGenerate({ specs }, ...this.#about(call));
    stream.on("error", () => {}); // whoever reads is told; who has left need not be
    try {
      yield* stream;
    } finally {
      stream.cancel();
    }
  }

  score(request, call = {}) {
    return this.#unary("score", request, call);
  }

  tokenize(text, call = {}) {
    return this.#unary("tokenize", { text }, call);
  }

  detokenize(ids, call = {}) {
    return this.#unary("detokenize", { ids }, call);
  }

  async listModels(call = {}) {
    return (await this.#unary("listModels", {}, call)).models;
  }

  close() {
    this.#stub.close();
  }

  #unary(method, request, call) {
    return new Promise((resolve, reject) => {
      this.#stub[method](request, ...this.#about(call), (error, answer) =>
        error ? reject(error) : resolve(answer),
      );
    });
  }

  // call: `requestId`, which the server's log will use, and `timeout`.
  #about({ requestId, timeout = this.#timeout }) {
    const metadata = new grpc.Metadata();
    if (this.#apiKey !== undefined) metadata.set("authorization", `Bearer ${this.#apiKey}`);
    if (requestId !== undefined) metadata.set("x-request-id", requestId);
    return [metadata, { deadline: new Date(Date.now() + timeout * 1000) }];
  }
}

function credentials(tls) {
  if (!tls) return grpc.credentials.createInsecure();
  const read = (path) => (path === undefined ? null : readFileSync(path));
  return grpc.credentials.createSsl(read(tls.ca), read(tls.key), read(tls.certificate));
}

/** What a failed request says: its status, its message, and the id by which the server's log knows it. */
export function explain(error) {
  const [requestId] = error.metadata?.get("x-request-id") ?? [];
  const name = grpc.status[error.code] ?? "UNKNOWN";
  return `${name}: ${error.details ?? error.message}${requestId ? ` (request ${requestId})` : ""}`;
}
