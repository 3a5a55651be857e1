"""llama.cpp through llama-cpp-python: one batch of all texts a step, as its server
decodes; a prompt after another."""

from __future__ import annotations

import time
from pathlib import Path

import llama_cpp
import numpy as np
from protocol import Make, serve

KINDS = {"float32": "F32", "bfloat16": "BF16"}
CACHES = {"float32": llama_cpp.GGML_TYPE_F32, "bfloat16": llama_cpp.GGML_TYPE_F16}
"""Of keys and values: as wide as the weights; of 16 bits its own choice."""

AT_ONCE = 512
"""Tokens that it runs together: its own choice."""


def open_model(folder: str, dtype: str, threads: int) -> tuple[str, Make]:
    path = Path(folder) / f"model-{KINDS[dtype]}.gguf"
    settings = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    if not model:
        raise RuntimeError(f"it does not open {path.name}")
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def make(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
        most = llama_cpp.llama_max_parallel_sequences()
        if len(prompts) > most:
            raise RuntimeError(f"it makes at most {most} texts together")
        shape = llama_cpp.llama_context_default_params()
        # Each text has cells of its own: in cells that all share, every query would go over the
        # keys of all texts.
        longest = max(map(len, prompts)) + tokens
        shape.n_ctx = -(-longest // 256) * 256 * len(prompts)
        shape.n_seq_max, shape.kv_unified = len(prompts), False
        shape.n_batch = shape.n_ubatch = AT_ONCE
        shape.n_threads = shape.n_threads_batch = threads
        shape.type_k = shape.type_v = CACHES[dtype]
        context = llama_cpp.llama_init_from_model(model, shape)
        if not context:
            raise RuntimeError(f"it makes no context for {len(prompts)} texts of {longest} tokens")
        batch = llama_cpp.llama_batch_init(max(AT_ONCE, len(prompts)), 0, 1)
        texts: list[list[int]] = [[] for _ in prompts]
        entries: list[tuple[int, int, int, bool]] = []

        def run() -> None:
            batch.n_tokens = len(entries)
            for i, (token, position, text, wanted) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, text
            if llama_cpp.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode refuses {len(entries)} tokens")
            for i, (_, _, text, wanted) in enumerate(entries):
                if wanted:
                    row = llama_cpp.llama_get_logits_ith(context, i)
                    texts[text].append(int(np.ctypeslib.as_array(row, shape=(size,)).argmax()))
            entries.clear()

        times = [time.perf_counter()]
        for text, prompt in enumerate(prompts):
            for at, token in enumerate(prompt):
                entries.append((token, at, text, at == len(prompt) - 1))
                if len(entries) == AT_ONCE or at == len(prompt) - 1:
                    run()
        times.append(time.perf_counter())
        for step in range(1, tokens):
            for text, prompt in enumerate(prompts):
                entries.append((texts[text][-1], len(prompt) + step - 1, text, True))
            run()
            times.append(time.perf_counter())
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        return texts, times

    return llama_cpp.__version__, make


if __name__ == "__main__":
    llama_cpp.llama_backend_init()
    serve(open_model)
