"""Greedy tokens by llama.cpp, for `benchmarks.llama_cpp_parity`: run by the Python that has
llama-cpp-python, which needs none of this project's packages.

    python benchmarks/llama_cpp_worker.py MODEL.gguf JOB.json RESULT.npz

JOB: {"texts": [text or list of ids, …], "tokens": how many to make}. RESULT: `prompt_i` the ids of
text i, `ids_i` those that were made, `best_i` (tokens, 2) the highest two ids of each step and
`gap_i` how far apart their logits are, `logits_i` all logits after the prompt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np


def main(model: str, job: str, result: str) -> None:
    wanted = json.loads(Path(job).read_text(encoding="utf-8"))
    # Its threads wait for each other in a loop; on a machine with other work, one is the fastest.
    # Its cache is float16 unless asked otherwise.
    llama = llama_cpp.Llama(
        model, n_ctx=512, n_batch=512, verbose=False, n_threads=1, n_threads_batch=1,
        type_k=llama_cpp.GGML_TYPE_F32, type_v=llama_cpp.GGML_TYPE_F32,
    )  # fmt: skip
    size = llama.n_vocab()
    found: dict[str, np.ndarray] = {}

    def logits() -> np.ndarray:
        row = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        return np.ctypeslib.as_array(row, shape=(size,)).copy()

    for i, text in enumerate(wanted["texts"]):
        ids = text
        if isinstance(text, str):
            ids = llama.tokenize(text.encode(), add_bos=True, special=False)
        made, best, gaps = [], [], []
        llama.reset()
        llama.eval(ids)
        found[f"logits_{i}"] = logits()
        for _ in range(wanted["tokens"]):
            scores = logits()
            first, second = np.argsort(-scores, kind="stable")[:2]
            made.append(first)
            best.append((first, second))
            gaps.append(scores[first] - scores[second])
            llama.eval([int(first)])
        found |= {
            f"prompt_{i}": np.array(ids, np.int64),
            f"ids_{i}": np.array(made, np.int64),
            f"best_{i}": np.array(best, np.int64),
            f"gap_{i}": np.array(gaps, np.float32),
        }
    np.savez(result, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
