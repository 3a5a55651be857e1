"""The same GGUF file in llama.cpp and here: ids of the prompts, logits, and greedy text.

    python -m benchmarks.llama_cpp_parity MODEL.gguf --llama PYTHON

PYTHON is an interpreter that has llama-cpp-python (`make llama-cpp-parity` makes one). Three
comparisons:

- MODEL itself. llama.cpp computes with quantised weights and rounds what goes into each product to
  8 bits as well; here weights are dequantised and the rest is float32. So texts part in the end.
- MODEL imported and exported again as F32, where the arithmetic is the same.
- Small random models of every family and rotary scaling, exported as F32.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpt.bench.output import machine_facts, machine_line
from gpt.cache import KVCache
from gpt.config import GPTConfig
from gpt.errors import UserError
from gpt.model import GPT
from gpt.plan import AttentionPlan, Chunk
from gpt.tokenizer import Tokenizer
from gpt.vocab import to_gguf
from gpt.weights.gguf_export import find_family, write_gguf
from gpt.weights.gguf_model import open_gguf
from gpt.weights.gguf_vocabulary import padded

PROMPTS = [
    "The capital of France is",
    "The largest planet in the solar system is",
    "Water boils at a temperature of",
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nx = np.",
    "1, 2, 3, 5, 8, 13,",
    "To make bread you need flour, water,",
    "In 1969, the first humans",
    "The opposite of hot is",
    "My favourite book is",
    "Dear Sir or Madam,\n\nI am writing to",
    "Q: What is 7 times 8?\nA:",
    "Photosynthesis is the process by which",
    "She opened the door and",
    "Das Wetter heute ist",
    "La tour Eiffel se trouve à",
    "<p>Hello, <b>",
    "The quick brown fox",
    "To be, or not to be,",
    "A haiku about autumn:\n",
    "SELECT name FROM users WHERE",
    "Der Fluss fließt 日本語 🙂",
]
LLAMA: dict[str, Any] = {
    "block_size": 256, "n_layer": 3, "n_head": 4, "n_kv_head": 2, "d_model": 64, "d_ff": 96,
    "mlp": "swiglu", "qk_norm": False, "init_std": 0.2,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "llama, interleaved, untied": {
        **LLAMA, "rope_layout": "interleaved", "tie_embeddings": False,
    },
    "llama, wide heads": {**LLAMA, "head_dim": 32},
    "llama, all biases": {**LLAMA, "bias": True},
    "llama, linear": {**LLAMA, "rope_scaling": "linear", "rope_factor": 4.0},
    "llama, ntk": {**LLAMA, "rope_scaling": "ntk", "rope_factor": 4.0},
    "llama, yarn": {
        **LLAMA, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_block_size": 64,
    },
    "llama, yarn, other magnitude": {
        **LLAMA, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_block_size": 64,
        "rope_attention_factor": 0.8,
    },
    "llama, llama3": {
        **LLAMA, "rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_block_size": 64,
    },
    "qwen2": {**LLAMA, "qkv_bias": True},
    "biases of queries, wide heads": {**LLAMA, "qkv_bias": True, "head_dim": 32},
    "qwen2, yarn": {
        **LLAMA, "qkv_bias": True, "rope_scaling": "yarn", "rope_factor": 4.0,
        "rope_original_block_size": 64,
    },
    "qwen3": {**LLAMA, "qk_norm": True, "head_dim": 32},
    "qwen3, interleaved": {**LLAMA, "qk_norm": True, "rope_layout": "interleaved"},
    "gpt2": {
        **LLAMA, "n_kv_head": None, "position": "learned", "norm": "layernorm", "mlp": "gelu",
        "bias": True,
    },
}  # fmt: skip


@dataclass
class Comparison:
    """One prompt in both.

    Attributes:
        same_prompt: whether its ids are.
        error: largest difference of a logit after the prompt, over the largest logit.
        parted: index of the first token that differs; None: none does.
        our_gap: how far we hold our token above theirs, there.
        their_gap: how far they hold their token above the next one, there.
    """

    same_prompt: bool
    error: float
    parted: int | None = None
    our_gap: float = 0.0
    their_gap: float = 0.0


@torch.inference_mode()
def compare(model: GPT, prompt: list[int], theirs: dict[str, np.ndarray], i: int) -> Comparison:
    """Greedy decoding over a paged cache, until it is theirs no more."""
    made, page = theirs[f"ids_{i}"].tolist(), 16
    n_pages = -(-(len(prompt) + len(made)) // page)
    cache = KVCache(model.config, 1 + n_pages, page, dtype=model.dtype)
    table = list(range(1, 1 + n_pages))

    def forward(ids: list[int], done: int) -> Tensor:
        chunk = [Chunk(done, len(ids), table)]
        plan = AttentionPlan.paged(chunk, page_size=page, pattern=model.pattern)
        return model(torch.tensor(ids), plan, cache)[-1]

    logits = forward(prompt, 0)
    wanted = torch.from_numpy(theirs[f"logits_{i}"])
    error = float((logits - wanted).abs().max() / wanted.abs().max())
    same = theirs[f"prompt_{i}"].tolist() == prompt
    for n, token in enumerate(made):
        own = int(logits.argmax())
        if own != token:
            gap = float(logits[own] - logits[token])
            return Comparison(same, error, n, gap, float(theirs[f"gap_{i}"][n]))
        logits = forward([token], len(prompt) + n)
    return Comparison(same, error)


def run_llama(python: str, path: Path, texts: list[Any], tokens: int) -> dict[str, np.ndarray]:
    """What llama.cpp makes of the texts. Raises UserError if it does not run."""
    with tempfile.TemporaryDirectory() as folder:
        job, result = Path(folder) / "job.json", Path(folder) / "result.npz"
        job.write_text(json.dumps({"texts": texts, "tokens": tokens}), encoding="utf-8")
        worker = Path(__file__).with_name("llama_cpp_worker.py")
        done = subprocess.run(
            [python, str(worker), str(path), str(job), str(result)], capture_output=True, text=True
        )
        if done.returncode or not result.exists():
            lines = done.stderr.strip().splitlines() or ["no message"]
            raise UserError(f"llama.cpp does not run {path.name}: {' / '.join(lines[-3:])}")
        with np.load(result) as arrays:
            return dict(arrays)


def open_model(path: Path) -> tuple[GPT, Tokenizer]:
    """In float32, dequantised."""
    foreign = open_gguf(path)
    assert foreign.tokenizer is not None, "the file has a vocabulary"
    state = {name: read().float() for name, read in foreign.weights.items()}
    return build(foreign.config, state), foreign.tokenizer


def build(config: GPTConfig, state: dict[str, Tensor]) -> GPT:
    with torch.device("meta"):
        model = GPT(config)
    tied = {"head.weight": state["embed.weight"]} if config.tie_embeddings else {}
    model.load_state_dict({**state, **tied}, assign=True)
    return model.eval()


def random_model(fields: dict[str, Any], vocab_size: int) -> GPT:
    """Norms and biases are random, too."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=vocab_size, **fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def report(title: str, prompts: list[str], found: list[Comparison], tokens: int) -> None:
    whole, error = sum(each.parted is None for each in found), max(each.error for each in found)
    print(
        f"\n{title}: {whole} of {len(found)} texts of {tokens} tokens are equal; logits after the"
    )
    print(f"  prompts differ by up to {error:.1e} of the largest")
    if not all(each.same_prompt for each in found):
        print(f"  prompts with other ids: {sum(not each.same_prompt for each in found)}")
    for prompt, each in zip(prompts, found, strict=True):
        if each.parted is not None:
            print(
                f"  {json.dumps(prompt)[:44]:44} part at token {each.parted:2}: ours leads theirs "
                f"by {each.our_gap:.4f}, with them the other way by {each.their_gap:.4f}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--llama", default="python3", help="a Python with llama-cpp-python")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to make of each prompt")
    args = parser.parse_args()
    print(machine_line(machine_facts()))

    model, tokenizer = open_model(args.model)
    prompts = [tokenizer.encode(text) for text in PROMPTS]
    if tokenizer.begin is not None:
        prompts = [[tokenizer.start, *ids] for ids in prompts]

    def run(title: str, path: Path) -> None:
        theirs = run_llama(args.llama, path, list(PROMPTS), args.tokens)
        found = [compare(model, ids, theirs, i) for i, ids in enumerate(prompts)]
        report(title, PROMPTS, found, args.tokens)

    run(f"{args.model.name} as it is", args.model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "f32.gguf"
        settings = padded(to_gguf(tokenizer), model.config.vocab_size)
        write_gguf(path, model.config, model.state_dict(), settings, kind="F32")
        run("imported, exported as F32", path)
        learned = Tokenizer.bpe(PROMPTS, 400)
        for name, fields in SMALL.items():
            small = Tokenizer.bytes() if name == "llama" else learned
            own = random_model(fields, small.n_vocab + 3)
            path = Path(folder) / f"{name}.gguf"
            settings = padded(to_gguf(small), own.config.vocab_size)
            write_gguf(path, own.config, own.state_dict(), settings)
            texts = [(text * 6)[:150] for text in PROMPTS]
            ids = [small.encode(text) for text in texts]
            title = f"small model: {name} ({find_family(own.config).name}, {small.kind})"
            try:
                theirs = run_llama(args.llama, path, texts, args.tokens)
            except UserError as error:
                print(f"\n{title}: {error}")
                continue
            found = [compare(own, each, theirs, i) for i, each in enumerate(ids)]
            report(title, PROMPTS, found, args.tokens)


if __name__ == "__main__":
    main()
