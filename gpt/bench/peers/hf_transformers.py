"""Transformers, as its users call it: `generate` on a batch padded to the left."""

from __future__ import annotations

import time

import torch
import transformers
from protocol import Make, serve
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList


class Clock(StoppingCriteria):
    """Asked after each token; notes when, and never stops."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)


def open_model(folder: str, dtype: str, threads: int) -> tuple[str, Make]:
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def make(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(each)) + each for each in prompts])
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in prompts])
        clock = Clock()
        with torch.inference_mode():
            found = model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                stopping_criteria=StoppingCriteriaList([clock]),
            )
        return found[:, longest:].tolist(), clock.times

    return transformers.__version__, make


if __name__ == "__main__":
    serve(open_model)
