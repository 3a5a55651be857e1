"""vLLM: its engine step by step, which is what its `LLM.generate` does, too."""

from __future__ import annotations

import os
import time

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine in this process
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # as many threads as OMP_NUM_THREADS says
    VLLM_CPU_KVCACHE_SPACE="1",  # GiB
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import vllm  # it reads the environment
from protocol import Make, serve, while_all_run


def open_model(folder: str, dtype: str, threads: int) -> tuple[str, Make]:
    engine = vllm.LLM(
        folder, dtype=dtype, skip_tokenizer_init=True, enable_prefix_caching=False, seed=0
    ).llm_engine
    asked = 0

    def make(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
        nonlocal asked
        settings = vllm.SamplingParams(
            temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        texts: list[list[int]] = [[] for _ in prompts]
        moments: list[list[float]] = [[] for _ in prompts]
        began = time.perf_counter()
        first = asked
        for prompt in prompts:
            engine.add_request(str(asked), {"prompt_token_ids": prompt}, settings)
            asked += 1
        while engine.has_unfinished_requests():
            found = engine.step()
            now = time.perf_counter()
            for each in found:
                i, made = int(each.request_id) - first, list(each.outputs[0].token_ids)
                moments[i] += [now] * (len(made) - len(texts[i]))
                texts[i] = made
        return texts, while_all_run(began, moments)

    return vllm.__version__, make


if __name__ == "__main__":
    serve(open_model)
