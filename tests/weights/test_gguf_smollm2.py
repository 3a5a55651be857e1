"""A real model, where its file is at hand: `SMOLLM2_GGUF` names it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers

from gpt.generate import generate
from gpt.params import SamplingParams
from gpt.weights.gguf_model import open_gguf
from gpt.weights.layout import cut, llama_layout
from tests.weights.test_gguf_model import close, model_of

FILE = Path(os.environ.get("SMOLLM2_GGUF", ""))

pytestmark = pytest.mark.skipif(not FILE.is_file(), reason="SMOLLM2_GGUF names no file")


@torch.inference_mode()
def test_smollm2_has_the_logits_of_transformers_and_knows_paris() -> None:
    foreign = open_gguf(FILE)
    config, tokenizer, model = foreign.config, foreign.tokenizer, model_of(foreign)
    assert tokenizer is not None
    assert foreign.chat_template is not None
    with torch.device("meta"):
        wanted = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.d_model,
                intermediate_size=config.mlp_width,
                num_hidden_layers=config.n_layer,
                num_attention_heads=config.n_head,
                num_key_value_heads=config.kv_heads,
                max_position_embeddings=config.block_size,
                rms_norm_eps=config.norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
                tie_word_embeddings=True,
            )
        )
    state = dict(cut(model.state_dict(), llama_layout(config)))
    wanted.load_state_dict({**state, "lm_head.weight": model.embed.weight}, assign=True)
    # Its table of angles is no weight: made on the meta device, it has no numbers.
    wanted.model.rotary_emb = type(wanted.model.rotary_emb)(wanted.config)
    ids = tokenizer.encode("The capital of France is")
    x = torch.tensor([ids * 10])
    assert close(model(x), wanted.eval()(x).logits)
    params = SamplingParams(temperature=0, max_tokens=4)
    assert "Paris" in "".join(piece.text for piece in generate(model, tokenizer, ids, params))
