"""LitGPT folders: `lit_model.pth` and `model_config.yaml`.

LitGPT stacks queries, keys and values in one matrix. Today they lie one below the other, as ours
do; before 2025 they were sorted by groups: the query heads that share a key head, that key head,
its value head, then the next group. The tensor's name tells which.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.params import brief
from gpt.weights.fields import Fields, read_text, smallest_period
from gpt.weights.files import Held, load_torch, tensors_of
from gpt.weights.huggingface import chat_template, open_vocabulary
from gpt.weights.layout import Layout, Part, count_layers, same, stacked
from gpt.weights.source import Foreign

CONFIG_FILE, WEIGHTS_FILE = "model_config.yaml", "lit_model.pth"
MAX_CONFIG, MAX_DEPTH = 1 << 16, 8


def open_folder(path: Path, *, vocabulary: bool = True) -> Foreign:
    """A LitGPT folder as a model of ours. Reads no weights yet.

    Args:
        vocabulary: False leaves the tokenizer out: whoever asks has another.

    Raises:
        CheckpointError: a setting or tensor that is not supported, or damaged files.
        TokenizerError: a vocabulary that cannot be expressed here.
    """
    file = path / WEIGHTS_FILE
    checkpoint = load_torch(file)
    if isinstance(checkpoint, dict) and isinstance(checkpoint.get("model"), dict):
        checkpoint = checkpoint["model"]  # as the trainer wraps it
    tensors = Held(tensors_of(checkpoint, file), file)
    n_layer = count_layers(tensors, "h")
    head, embedding = "lm_head.weight", "transformer.wte.weight"
    tied = {head, embedding} <= set(tensors.names()) and same(tensors, head, embedding)
    config = read_config(_yaml(path / CONFIG_FILE), str(path / CONFIG_FILE), n_layer, tied)
    by_groups = any(".attn.attn." in name for name in tensors.names())
    layout = litgpt_layout(config, "attn" if by_groups else "qkv")
    weights = stacked(tensors, layout, str(file), r"lm_head\.weight" if tied else r"(?!)")
    if by_groups:
        for name in weights:
            if ".attn.qkv." in name:
                weights[name] = _ungrouped(weights[name], config)
    origin = {"format": "litgpt", "source": path.resolve().name}
    return Foreign(
        config,
        weights,
        open_vocabulary(path) if vocabulary else None,
        chat_template(path),
        origin,
    )


def _yaml(path: Path) -> Any:
    text = read_text(path)
    if len(text) > MAX_CONFIG:
        raise CheckpointError(f"{path} has {len(text)} characters; that is no configuration")
    try:
        # Aliases let a few lines stand for billions of values, and depth takes quadratic time.
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > MAX_DEPTH:
                raise CheckpointError(
                    f"{path} uses aliases or values {MAX_DEPTH} deep, which LitGPT does not write"
                )
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        reason = (str(error).splitlines() or ["?"])[0][:200]
        raise CheckpointError(f"{path} is not YAML: {reason}") from None


def read_config(values: Any, where: str, n_layer: int, tied: bool) -> GPTConfig:
    """The architecture.

    Args:
        n_layer: how many layers the weights have.
        tied: whether head and embedding are one: LitGPT does not say.

    Raises:
        CheckpointError: a value that cannot be, or a setting that is not supported.
    """
    fields = Fields(values, where)
    name = fields.text("name", "")
    if "Gemma" in name or "OLMo" in name:  # there the name alone changes what norms compute
        fields.refuse("name", f"is {brief(name)}: LitGPT's models of that name are not supported")
    fields.ignore("hf_config", "padding_multiple")
    claimed = fields.integer("n_layer", 16)
    if claimed != n_layer:
        fields.refuse("n_layer", f"is {claimed}, but the weights have {n_layer} layers")
    _refuse_others(fields)
    mlp = fields.text("mlp_class_name", "GptNeoxMLP")
    approximate = fields.text("gelu_approximate", "none")
    if mlp not in ("GptNeoxMLP", "LLaMAMLP") or approximate not in ("none", "tanh"):
        fields.refuse(
            "mlp_class_name", f"is {brief(mlp)} with gelu_approximate {brief(approximate)}; those "
            "that can be imported are GptNeoxMLP (none or tanh) and LLaMAMLP",
        )  # fmt: skip
    gelu = "gelu" if approximate == "tanh" else "gelu-exact"
    norm = fields.text("norm_class_name", "LayerNorm")
    bias, attn_bias = fields.flag("bias", True), fields.flag("attn_bias", False)
    if norm == "LayerNorm" and not bias:
        fields.refuse("bias", "is false with norm_class_name LayerNorm, which has one all the same")
    n_head, d_model = fields.integer("n_head", 32), fields.integer("n_embd", 4096)
    head_dim = fields.integer("head_size", None)
    width = head_dim or d_model // n_head
    share = fields.take("rotary_percentage", 0.25)
    if type(share) not in (int, float) or not 0 < share <= 1:
        fields.refuse("rotary_percentage", f"is {brief(share)}, but must be above 0, at most 1")
    n_kv_head = fields.integer("n_query_groups", None)
    fields.ignore("vocab_size")  # how many of the padded ones are used
    scalar = fields.number("attention_scores_scalar", None)
    try:
        config = GPTConfig(
            vocab_size=fields.integer("padded_vocab_size"),
            block_size=fields.integer("block_size", 4096),
            n_layer=n_layer,
            n_head=n_head,
            n_kv_head=None if n_kv_head in (None, n_head) else n_kv_head,
            d_model=d_model,
            head_dim=None if width * n_head == d_model else width,
            d_ff=fields.integer("intermediate_size", 4 * d_model),
            position="rotary",
            rope_dims=None if share == 1 else int(share * width),
            **_rope(fields),
            pattern=_pattern(fields, n_layer),
            norm={"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}.get(norm, norm),
            norm_eps=fields.number("norm_eps", 1e-5),
            mlp="swiglu" if mlp == "LLaMAMLP" else gelu,  # type: ignore[arg-type]
            bias=bias,
            qkv_bias=True if attn_bias and not bias else None,
            qk_norm=_qk_norm(fields, norm),
            attn_scale=None if scalar is None else scalar**-0.5,
            logit_softcap=fields.number("final_logit_softcapping", None),
            tie_embeddings=tied,
        )
    except ConfigError as error:
        raise CheckpointError(f"{where} describes no model that can be built: {error}") from None
    fields.finish()
    return config


def _refuse_others(fields: Fields) -> None:
    """What other families need, at the value that leaves it out."""
    if fields.flag("parallel_residual", True):
        fields.refuse("parallel_residual", "is true (its default), which is not supported")
    for name in ("post_attention_norm", "post_mlp_norm", "lm_head_bias", "shared_attention_norm",
                 "scale_embeddings", "rope_interleave", "norm_topk_prob"):  # fmt: skip
        fields.only(name, False)
    fields.only("norm_1", True)
    fields.only("norm_2", True)
    for name in ("n_expert", "n_expert_per_token", "n_shared_expert", "n_expert_groups",
                 "n_topk_groups", "n_topk_scores_per_group"):  # fmt: skip
        fields.only(name, 0)
    fields.only("routed_scaling_factor", 1.0, 1)
    for name in ("attention_logit_softcapping", "latent_attention", "rope_local_base_freq",
                 "rope_indices", "moe_intermediate_size", "first_k_dense_replace"):  # fmt: skip
        fields.only(name)


def _qk_norm(fields: Fields, norm: str) -> bool:
    found: bool = fields.flag("norm_qk", False)
    kind = fields.text("norm_qk_type", "default")
    if found and (kind != "default" or norm != "RMSNorm"):
        fields.refuse("norm_qk", "is true, but is supported only as RMSNorm over each head")
    return found


def _rope(fields: Fields) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_base": fields.number("rope_base", 10000.0)}
    condensed = fields.number("rope_condense_ratio", 1.0)
    adjusted = fields.section("rope_adjustments")
    if adjusted is None:
        if condensed != 1:
            found |= {"rope_scaling": "linear", "rope_factor": condensed}
        return found
    if condensed != 1:
        fields.refuse("rope_condense_ratio", "is given beside rope_adjustments")
    factor = adjusted.number("factor")
    if adjusted.has("low_freq_factor") or adjusted.has("high_freq_factor"):
        found |= {
            "rope_scaling": "llama3",
            "rope_factor": factor,
            "rope_low_freq_factor": adjusted.number("low_freq_factor"),
            "rope_high_freq_factor": adjusted.number("high_freq_factor"),
            "rope_original_block_size": adjusted.integer("original_max_seq_len"),
        }
    else:
        found |= {"rope_scaling": "linear", "rope_factor": factor}
    adjusted.finish()
    return found


def _pattern(fields: Fields, n_layer: int) -> list[str] | str:
    window = fields.integer("sliding_window_size", None)
    where = fields.take("sliding_window_indices", None)
    if window is None:
        return "causal"
    if where is None:
        where = [1] * n_layer
    good = isinstance(where, list) and all(type(each) in (int, bool) for each in where)
    if not good or len(where) != n_layer:
        fields.refuse("sliding_window_indices", f"is no list of {n_layer} numbers, one a layer")
    return smallest_period(f"window:{window}" if each else "causal" for each in where)


def litgpt_layout(config: GPTConfig, qkv: str) -> Layout:
    """Where our weights stand. `qkv`: what the stacked matrix is called."""
    C, D, F, V = config.d_model, config.head_width, config.mlp_width, config.vocab_size
    H, K = config.n_head * D, config.kv_heads * D
    gated = config.mlp == "swiglu"
    first = ("mlp.fc_1", "mlp.fc_2") if gated else ("mlp.fc",)
    layout: Layout = {"embed.weight": (Part("transformer.wte.weight", (V, C)),)}

    def norm(ours: str, theirs: str) -> None:
        layout[f"{ours}.weight"] = (Part(f"{theirs}.weight", (C,)),)
        if config.norm == "layernorm":
            layout[f"{ours}.bias"] = (Part(f"{theirs}.bias", (C,)),)

    def linear(ours: str, theirs: tuple[str, ...], out: int, width: int, bias: bool) -> None:
        layout[f"{ours}.weight"] = tuple(Part(f"{name}.weight", (out, width)) for name in theirs)
        if bias:
            layout[f"{ours}.bias"] = tuple(Part(f"{name}.bias", (out,)) for name in theirs)

    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        norm(f"{ours}.norm_attn", f"{theirs}.norm_1")
        linear(f"{ours}.attn.qkv", (f"{theirs}.attn.{qkv}",), H + 2 * K, C, config.has_qkv_bias)
        linear(f"{ours}.attn.out", (f"{theirs}.attn.proj",), C, H, config.bias)
        if config.qk_norm:
            for ours_norm, name in (("q_norm", "norm_q"), ("k_norm", "norm_k")):
                part = Part(f"{theirs}.attn.{name}.weight", (D,))
                layout[f"{ours}.attn.{ours_norm}.weight"] = (part,)
        norm(f"{ours}.norm_mlp", f"{theirs}.norm_2")
        up = tuple(f"{theirs}.{name}" for name in first)
        linear(f"{ours}.mlp.up", up, F, C, config.has_mlp_bias)
        linear(f"{ours}.mlp.down", (f"{theirs}.mlp.proj",), C, F, config.has_mlp_bias)
    norm("norm", "transformer.ln_f")
    if not config.tie_embeddings:
        layout["head.weight"] = (Part("lm_head.weight", (V, C)),)
    return layout


def _ungrouped(read: Callable[[], Tensor], config: GPTConfig) -> Callable[[], Tensor]:
    """Rows sorted by groups of heads, sorted by what they make instead."""
    H, K, D = config.n_head, config.kv_heads, config.head_width

    def sort() -> Tensor:
        grouped = read()
        heads = grouped.view(K, H // K + 2, D, *grouped.shape[1:])
        parts = (heads[:, : H // K], heads[:, -2:-1], heads[:, -1:])
        return torch.cat([part.flatten(0, 2) for part in parts])

    return sort
