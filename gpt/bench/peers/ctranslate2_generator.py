"""CTranslate2: its own converter from a Transformers folder, and its generator.

Of prompts of different lengths it reads at once only as many tokens as the shortest has; the rest
go through the decoding loop, one a step, while the shorter texts are made. Those go on here until
the longest prompt's text is long enough, so that there are steps in which all texts run, and what
they make beyond is cut off. Reading such prompts therefore takes as long as it takes its users.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import ctranslate2
from ctranslate2.converters import TransformersConverter
from protocol import Make, serve
from transformers import AutoConfig


class Converter(TransformersConverter):
    """Words are the numbers themselves, as prompts are given in words."""

    def load_tokenizer(self, _: object, folder: str, **__: object) -> SimpleNamespace:
        size = AutoConfig.from_pretrained(folder).vocab_size
        words = {str(i): i for i in range(size)}
        return SimpleNamespace(get_vocab=lambda: words, bos_token="0", eos_token="0", unk_token="0")


def open_model(folder: str, dtype: str, threads: int) -> tuple[str, Make]:
    able = ctranslate2.get_supported_compute_types("cpu")
    if dtype not in able:
        raise RuntimeError(f"it has no {dtype} on this CPU, only {', '.join(sorted(able))}")
    own = Path(folder).with_name("ctranslate2")
    if not own.exists():
        Converter(folder).convert(str(own))
    generator = ctranslate2.Generator(
        str(own), compute_type=dtype, inter_threads=1, intra_threads=threads
    )

    def make(prompts: list[list[int]], tokens: int) -> tuple[list[list[int]], list[float]]:
        ahead = max(map(len, prompts)) - min(map(len, prompts))
        last = ahead + tokens - 1
        times: dict[int, float] = {}

        def note(event: ctranslate2.GenerationStepResult) -> bool:
            times[event.step] = time.perf_counter()
            return event.step == last  # over

        began = time.perf_counter()
        found = generator.generate_batch(
            [list(map(str, prompt)) for prompt in prompts],
            include_prompt_in_result=False,
            max_length=ahead + tokens,
            end_token=[],
            callback=note,
        )
        texts = [each.sequences_ids[0][:tokens] for each in found]
        return texts, [began, *(times[step] for step in range(ahead, last + 1))]

    return ctranslate2.__version__, make


if __name__ == "__main__":
    serve(open_model)
