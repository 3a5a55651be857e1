"""llama.cpp through llama-cpp-python: one batch of all sequences a step, as its server decodes."""

from __future__ import annotations

import time
from pathlib import Path

import llama_cpp
import numpy as np
from protocol import Make, serve

KINDS = {"float32": "F32", "bfloat16": "BF16"}


def open_model(folder: str, dtype: str, threads: int) -> tuple[str, Make]:
    path = Path(folder) / f"model-{KINDS[dtype]}.gguf"
    settings = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
    if not model:
        raise RuntimeError(f"llama.cpp does not open {path.name}")
    size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def make(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
        cells = sum(map(len, prompts)) + len(prompts) * (tokens + 1)
        shape = llama_cpp.llama_context_default_params()
        shape.n_ctx, shape.n_batch, shape.n_ubatch = cells + 256, 512, 512
        shape.n_seq_max, shape.kv_unified = len(prompts), True
        shape.n_threads = shape.n_threads_batch = threads
        context = llama_cpp.llama_init_from_model(model, shape)
        batch = llama_cpp.llama_batch_init(512, 0, 1)
        texts: list[list[int]] = [[] for _ in prompts]
        entries: list[tuple[int, int, int, bool]] = []

        def run() -> None:
            batch.n_tokens = len(entries)
            for i, (token, position, text, wanted) in enumerate(entries):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, text
            if llama_cpp.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            for i, (_, _, text, wanted) in enumerate(entries):
                if wanted:
                    row = llama_cpp.llama_get_logits_ith(context, i)
                    texts[text].append(int(np.ctypeslib.as_array(row, shape=(size,)).argmax()))
            entries.clear()

        times = [time.perf_counter()]
        for text, prompt in enumerate(prompts):
            for at, token in enumerate(prompt):
                entries.append((token, at, text, at == len(prompt) - 1))
                if len(entries) == 512:
                    run()
        if entries:
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
