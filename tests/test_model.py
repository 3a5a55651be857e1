"""GPT: what each architecture field does. (That it computes the right function: test_parity.)"""

from __future__ import annotations

import pytest
import torch

from gpt.config import GPTConfig
from gpt.model import GPT
from tests.strategies import build

CONFIG = GPTConfig(vocab_size=64, block_size=16, n_layer=3, n_head=4, d_model=64)


def test_projections_into_the_stream_start_smaller() -> None:
    """GPT-2's rule: init_std / sqrt(2 * n_layer) for the matrices that end a branch."""
    torch.manual_seed(0)
    model = GPT(CONFIG.replace(n_layer=8, d_model=128, init_std=0.05, bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert parameter.abs().max() == 0
        elif "norm" not in name:
            small = name.endswith(("attn.out.weight", "mlp.down.weight"))
            assert parameter.std().item() == pytest.approx(0.05 / 4 if small else 0.05, rel=0.05)


def test_a_tied_head_is_one_matrix_and_gets_both_gradients() -> None:
    tied, untied = GPT(CONFIG), GPT(CONFIG.replace(tie_embeddings=False))
    assert untied.num_params() - tied.num_params() == 64 * 64
    tied(torch.arange(16)[None]).square().sum().backward()
    assert tied.head.weight.grad is tied.embed.weight.grad is not None


def test_dropout_acts_in_training_only() -> None:
    model = GPT(CONFIG.replace(dropout=0.5))
    ids = torch.arange(16)[None]
    assert not torch.equal(model.train()(ids), model(ids))
    assert torch.equal(model.eval()(ids), model(ids))


def test_the_soft_cap_bounds_the_logits() -> None:
    model = build(CONFIG.replace(logit_softcap=2.0, init_std=3.0))
    assert model(torch.arange(16)[None]).abs().max() <= 2.0


def test_a_later_token_never_changes_an_earlier_logit() -> None:
    model = build(CONFIG)
    a = torch.arange(16)[None]
    b = a.clone()
    b[0, 10:] += 20
    same = (model(a) == model(b)).all(-1)[0]
    assert same[:10].all()
    assert not same[10:].any()


def test_rotary_scores_depend_on_distance_only() -> None:
    """One layer, and the same pair of tokens further right in otherwise equal company."""
    model = build(CONFIG.replace(n_layer=1, pattern="window:3"))
    ids = torch.tensor([[1, 1, 1, 5, 7, 1, 1, 1, 5, 7]])
    logits = model(ids)[0]
    torch.testing.assert_close(logits[4], logits[9])
    learned = build(CONFIG.replace(n_layer=1, pattern="window:3", position="learned"))(ids)[0]
    assert (learned[4] - learned[9]).abs().max() > 1e-3


def test_more_tokens_than_the_context_are_refused() -> None:
    with pytest.raises(ValueError, match="17 tokens, but the context holds 16"):
        GPT(CONFIG)(torch.zeros(1, 17, dtype=torch.long))


def test_compiling_changes_neither_keys_nor_logits() -> None:
    """T4: compiled in place, so that checkpoints load either way."""
    plain, compiled = build(CONFIG, 1, torch.float32), build(CONFIG, 1, torch.float32)
    compiled.compile(backend="aot_eager")
    ids = torch.arange(16)[None]
    torch.testing.assert_close(compiled(ids), plain(ids))
    assert list(compiled.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(compiled.state_dict())
    compiled.load_state_dict(plain.state_dict())


def test_a_few_steps_of_training_learn_a_text_by_heart() -> None:
    """Every branch gets a useful gradient: the loss of a fixed text falls to almost nothing."""
    torch.manual_seed(0)
    model = GPT(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    ids = torch.randint(0, 64, (4, 17))
    for _ in range(120):
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
