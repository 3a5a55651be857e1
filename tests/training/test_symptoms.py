"""When a diagnosis turns into a warning, and what the warning says."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch

from gpt.config import GPTConfig
from gpt.diagnosis import LayerReport, measure
from gpt.model import GPT
from gpt.training.optim import OptimizerConfig
from gpt.training.symptoms import RULES, Setting, Snapshot, Symptoms

HEALTHY = LayerReport(
    entropy=[2.0, 3.0],
    entropy_share=[0.5, 0.8],
    logit_max=[8.0, 6.0],
    fixed=[0.3, 0.1],
    offset=[0.2, 0.1],
    head_rms=[0.1, 0.2],
    attn_rms=0.2,
    mlp_rms=0.3,
    stream_rms=1.0,
    dead_units=0.1,
)
GRADIENTS = {"embed": 0.5, "0": 0.1, "1": 0.2, "2": 0.1, "head": 0.3, "total": 1.0}


def setting(model=None, optimizer=None, unigram=5.0):
    return Setting(GPTConfig(**(model or {})), OptimizerConfig(**(optimizer or {})), unigram)


def seen(step, *, layer=1, loss=2.0, gradients=None, **changes):
    layers = [HEALTHY] * 3
    layers[layer] = dataclasses.replace(HEALTHY, **changes)
    return Snapshot(step, loss, {**GRADIENTS, **(gradients or {})}, layers)


def kinds(symptoms, snapshot):
    return [kind for kind, _ in symptoms.look(snapshot)]


def test_a_healthy_model_gives_no_warning():
    symptoms = Symptoms(setting())
    for step in range(0, 3000, 100):
        assert symptoms.look(seen(step)) == []


@pytest.mark.parametrize(
    ("kind", "changes", "model", "told"),
    [
        ("uniform_heads", {"entropy_share": [0.4, 0.999]}, {"attn_scale": 1e-3},
         "uniform heads .layer 1 head 1.:.*raise model.config.attn_scale .now 0.001; 1/sqrt"),
        ("uniform_heads", {"entropy_share": [1.0, 1.0]}, {"qk_norm": False},
         "layer 1 heads 0, 1.: .*set model.config.qk_norm to true.*model.optimizer.lr"),
        ("collapsed_heads", {"entropy_share": [0.004, 0.5]}, {"attn_scale": 4.0},
         "head 0.: all weight.*lower model.config.attn_scale .now 4;.*warmup_steps.*optimizer.lr"),
        ("collapsed_heads", {"fixed": [0.1, 0.995]}, {}, "head 1.: .*one key"),
        ("large_logits", {"logit_max": [300.0, 2.0]}, {"qk_norm": False},
         "head 0.: .*qk_norm to true.*attn_scale"),
        ("large_logits", {"logit_max": [math.nan, 2.0]}, {}, "beyond 100"),
        ("dead_heads", {"head_rms": [0.0, 0.2]}, {}, "head 0.: .*warmup_steps.*residual_scale"),
        ("dead_heads", {"head_rms": [1e-3, 0.2]}, {}, "model.config.n_head, now 4"),
        ("dead_units", {"dead_units": 0.9}, {}, "layer 1.: .*optimizer.lr.*swiglu"),
        ("idle_blocks", {"attn_rms": 1e-5, "mlp_rms": 1e-5}, {"residual_scale": 1e-4},
         "raise model.config.residual_scale .now 0.0001.*init_std"),
        ("large_activations", {"stream_rms": 2e3, "head_rms": [9.0, 9.0], "attn_rms": 18.0},
         {"norm_place": "post"},
         "norm_place to pre.*residual_scale"),
        ("large_activations", {"stream_rms": math.inf}, {}, "layer 1.: the root mean square"),
        ("small_activations", {"stream_rms": 1e-3, "attn_rms": 1e-4, "head_rms": [1e-5, 1e-5]},
         {"init_std": 1e-4}, "raise model.config.init_std .now 0.0001"),
        ("large_gradients", {"gradients": {"1": 1e4}}, {}, "layer 1.: .*warmup_steps.*optimizer"),
        ("small_gradients", {"gradients": {"0": 1e-6}}, {"norm_place": "post"},
         "layer 0.: .*norm_place to pre.*residual_scale"),
        ("small_gradients", {"gradients": {"0": 0.0, "1": 0.0, "2": 0.0}}, {}, "layer 0; layer 1"),
    ],
)  # fmt: skip
def test_each_illness_is_named_with_the_settings_that_help(kind, changes, model, told):
    symptoms = Symptoms(setting(model))
    found = [symptoms.look(seen(step, **changes)) for step in (400, 500, 600)]
    assert [name for warnings in found for name, _ in warnings] == [kind]
    text = next(warnings[0][1] for warnings in found if warnings)
    assert re.search(told, text), text
    assert "\n" not in text


def test_a_sharp_head_that_reads_the_token_before_is_not_collapsed():
    symptoms = Symptoms(setting())
    for step in (400, 500, 600):
        assert not symptoms.look(seen(step, entropy_share=[0.002, 0.5], offset=[0.99, 0.2]))


def test_a_norm_after_the_branch_makes_a_faint_stream_harmless():
    symptoms = Symptoms(setting({"norm_place": "post"}))
    for step in (400, 500, 600):
        assert not symptoms.look(seen(step, stream_rms=1e-3))


def test_heads_may_be_anything_while_weights_are_new_but_explosions_are_told_at_once():
    symptoms = Symptoms(setting(optimizer={"warmup_steps": 700}))
    changes = {"entropy_share": [1.0, 0.0], "logit_max": [1e3, 1.0]}
    assert kinds(symptoms, seen(100, **changes)) == []
    assert kinds(symptoms, seen(200, **changes)) == ["large_logits"]
    for step in range(300, 800, 100):
        assert kinds(symptoms, seen(step, **changes)) == []
    assert kinds(symptoms, seen(800, **changes)) == ["uniform_heads", "collapsed_heads"]


def test_a_number_that_hovers_about_the_threshold_gives_one_warning():
    symptoms = Symptoms(setting())
    told = []
    for step in range(300, 1200, 100):
        told += kinds(symptoms, seen(step, logit_max=[[101.0, 98.0][step // 100 % 2], 1.0]))
    assert told == []  # never twice running
    for step in range(1200, 4000, 100):
        value = 101.0 if step < 1500 else 98.0 if step < 3000 else 40.0
        told += [(step, kind) for kind in kinds(symptoms, seen(step, logit_max=[value, 1.0]))]
    # Told when it lasts, again after a while as it is not well below; not once it is.
    assert told == [(1300, "large_logits"), (2300, "large_logits")]


def test_many_places_are_told_in_one_short_line():
    symptoms = Symptoms(setting())
    ill = dataclasses.replace(HEALTHY, logit_max=[500.0, 500.0])
    for step in (100, 200):
        warnings = symptoms.look(Snapshot(step, 2.0, GRADIENTS, [ill] * 7))
    ((_, text),) = warnings
    assert text.startswith("large logits (layer 0 heads 0, 1; layer 1 heads 0, 1; ")
    assert "layer 3 heads 0, 1 (and 3 more layers)): scores" in text


def losses(symptoms, values, every=100):
    return [
        (i * every, text)
        for i, loss in enumerate(values, 1)
        for kind, text in symptoms.look(seen(i * every, loss=loss))
        if kind == "stalled_loss"
    ]


def test_a_loss_that_stays_where_it_began_is_told_with_the_learning_rate():
    symptoms = Symptoms(setting(optimizer={"lr": 1e-9, "warmup_steps": 100}))
    ((step, text),) = losses(symptoms, [7.6] * 9)
    assert step == 400
    assert "stalled loss: not fallen for 300 steps" in text
    assert "model.optimizer.lr (now 1e-09; train.py lr-find" in text


def test_a_loss_that_rose_again_is_told_with_warm_up_and_a_lower_rate():
    symptoms = Symptoms(setting(optimizer={"lr": 0.5}))
    ((_, text),) = losses(symptoms, [5.5, 7.0, 7.0, 7.0, 7.0])
    assert "warm up longer (model.optimizer.warmup_steps, now 100) or lower" in text


@pytest.mark.parametrize(
    ("values", "unigram", "warmup"),
    [
        ([7.6 - 0.05 * i for i in range(20)], 5.0, 100),  # slow, but on its way
        ([4.0] * 20, 5.0, 100),  # at its end, where it should be
        ([7.6] * 9, 5.0, 2000),  # still warming up
        ([math.nan] * 9, 5.0, 100),  # another's business
        ([7.6] * 9, math.inf, 100),  # nothing to compare with
    ],
)
def test_a_loss_is_not_stalled(values, unigram, warmup):
    symptoms = Symptoms(setting(optimizer={"warmup_steps": warmup}, unigram=unigram))
    assert losses(symptoms, values) == []


def illnesses(gpt):
    ids = torch.randint(40, (2, 32), generator=torch.Generator().manual_seed(0))
    symptoms = Symptoms(Setting(gpt.config, OptimizerConfig()))
    layers = measure(gpt, lambda: gpt(ids))
    gradients = {"0": 0.1, "1": 0.1}
    return {
        kind: text
        for step in (300, 400)
        for kind, text in symptoms.look(Snapshot(step, 2.0, gradients, layers))
    }


@torch.no_grad()
def test_models_built_ill_are_found_out_and_a_new_one_is_well():
    def built(**changes):
        torch.manual_seed(0)
        config = {"n_layer": 2, "n_head": 4, "d_model": 32, "block_size": 32, **changes}
        return GPT(GPTConfig(vocab_size=40, **config))

    assert illnesses(built()) == {}

    gpt = built()
    gpt.blocks[1].attn.qkv.weight[8:16] = 0  # the queries of head 1
    assert list(illnesses(gpt)) == ["uniform_heads"]
    assert "(layer 1 head 1)" in illnesses(gpt)["uniform_heads"]

    gpt = built(attn_scale=1e-5)
    assert "layer 0 heads 0, 1, 2, 3; layer 1" in illnesses(gpt)["uniform_heads"]

    gpt = built(attn_scale=1e3)
    assert set(illnesses(gpt)) == {"collapsed_heads", "large_logits"}

    gpt = built(qk_norm=False, position="learned", bias=True, norm="layernorm")
    attn = gpt.blocks[0].attn
    gpt.embed_pos.weight.zero_()
    gpt.embed_pos.weight[0] = first = torch.randn(32)
    attn.qkv.weight[:8] = 0
    attn.qkv.bias[:8] = 1  # every token asks the same, and the first answers loudest
    attn.qkv.weight[32:40] = first
    assert "(layer 0 head 0)" in illnesses(gpt)["collapsed_heads"]

    gpt = built()
    gpt.blocks[0].attn.out.weight[:, 24:] = 0
    assert list(illnesses(gpt)) == ["dead_heads"]
    assert "(layer 0 head 3)" in illnesses(gpt)["dead_heads"]

    assert "small_activations" in illnesses(built(init_std=1e-4))
    assert "large_activations" in illnesses(built(init_std=20.0))


def test_kinds_have_names_of_their_own():
    assert len({rule.kind for rule in RULES}) == len(RULES)
    assert all(rule.off < rule.on for rule in RULES)
