"""Rotary settings between `config.json` and `GPTConfig`; what they compute is in `gpt.rotary`.

Two spellings are about: `rope_theta` with `rope_scaling` (`type` or `rope_type` in it), and, since
version 5 of `transformers`, all of it in `rope_parameters`.
"""

from __future__ import annotations

import math
from typing import Any

from gpt.config import GPTConfig
from gpt.params import brief
from gpt.weights.fields import Fields


def read_rope(fields: Fields, context: int) -> dict[str, Any]:
    """The fields of GPTConfig that say how queries and keys are turned.

    Args:
        context: max_position_embeddings.
    """
    fields.only("partial_rotary_factor", 1, 1.0)
    base = fields.number("rope_theta", None)
    older, newer = fields.section("rope_scaling"), fields.section("rope_parameters")
    if older is not None and newer is not None:
        fields.refuse("rope_scaling", "is given beside rope_parameters; keep one of them")
    rope = older or newer
    if rope is None:
        return {"rope_base": 10000.0 if base is None else base}
    inner = rope.number("rope_theta", base)
    base = 10000.0 if inner is None else inner
    rope.only("partial_rotary_factor", 1, 1.0)
    old, new = rope.text("type", None), rope.text("rope_type", None)
    kind = new or old or "default"
    found: dict[str, Any] = {"rope_base": base}
    if kind == "dynamic":
        rope.refuse(
            "rope_type",
            "is 'dynamic', which turns the same token otherwise as a text grows; that is not "
            f"supported. Up to {context} tokens it changes nothing: delete rope_scaling to use "
            "the model as far as that",
        )  # fmt: skip
    if kind in ("linear", "llama3", "yarn"):
        found |= _scaling(kind, rope, fields, context)
    elif kind != "default":
        rope.refuse("rope_type", f"is {brief(kind)}; there are default, linear, llama3 and yarn")
    rope.finish()
    return found


def _scaling(kind: str, rope: Fields, fields: Fields, context: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_scaling": kind}
    if kind == "linear":
        return found | {"rope_factor": rope.number("factor")}
    outside = fields.integer("original_max_position_embeddings", None)
    inside = rope.integer("original_max_position_embeddings", None)
    original = outside or inside or context
    found["rope_original_block_size"] = original
    if kind == "llama3":
        return found | {
            "rope_factor": rope.number("factor"),
            "rope_low_freq_factor": rope.number("low_freq_factor"),
            "rope_high_freq_factor": rope.number("high_freq_factor"),
        }
    factor = rope.number("factor", None) or context / original
    magnitude = rope.number("attention_factor", None)
    fine, all_dim = rope.number("mscale", None), rope.number("mscale_all_dim", None)
    if magnitude is None and fine and all_dim:
        magnitude = _magnitude(factor, fine) / _magnitude(factor, all_dim)
    return found | {
        "rope_factor": factor,
        "rope_attention_factor": magnitude,
        "rope_beta_fast": rope.number("beta_fast", 32.0),
        "rope_beta_slow": rope.number("beta_slow", 1.0),
        "rope_truncate": rope.flag("truncate", True),
    }


def _magnitude(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def write_rope(config: GPTConfig) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling` of a model with rotary positions: the spelling that all
    versions read."""
    R, base, factor = config.rope_width, config.rope_base, config.rope_factor
    kind = config.rope_scaling
    if kind == "ntk":  # nothing but another base
        return {"rope_theta": base * factor ** (R / (R - 2)), "rope_scaling": None}
    if kind == "none":
        return {"rope_theta": base, "rope_scaling": None}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = config.rope_original_block_size
    if kind == "llama3":
        scaling["low_freq_factor"] = config.rope_low_freq_factor
        scaling["high_freq_factor"] = config.rope_high_freq_factor
    if kind == "yarn":
        scaling |= {"beta_fast": config.rope_beta_fast, "beta_slow": config.rope_beta_slow}
        scaling["truncate"] = config.rope_truncate
        if config.rope_attention_factor is not None:
            scaling["attention_factor"] = config.rope_attention_factor
    return {"rope_theta": base, "rope_scaling": scaling}
