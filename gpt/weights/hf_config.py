"""`config.json` of a Hugging Face folder as a `GPTConfig`.

Names and defaults are those of the configuration classes in `transformers` (a field that a file
leaves out has its class's default). Rotary settings are in `gpt.weights.hf_rope`.
"""

from __future__ import annotations

from typing import Any

from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.params import brief
from gpt.weights.fields import Fields, smallest_period
from gpt.weights.hf_rope import read_rope

ARCHITECTURES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Model"),
    "llama": ("LlamaForCausalLM", "LlamaModel"),
    "mistral": ("MistralForCausalLM", "MistralModel"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Model"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Model"),
}
"""The families by `model_type`, with the classes that a folder of theirs may name."""

_NO_MATTER = (
    # How it was made, by whom, and with what.
    "model_type", "torch_dtype", "dtype", "transformers_version", "initializer_range",
    "transformers.js_config", "unsloth_fixed", "unsloth_version", "gradient_checkpointing",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id",
    "tokenizer_class", "prefix", "task_specific_params", "id2label", "label2id", "num_labels",
    "problem_type", "finetuning_task", "is_llama_config",
    # Only in training, or only in other heads than the language model's.
    "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
    "summary_use_proj", "classifier_dropout",
    # How it is run.
    "use_cache", "pretraining_tp", "reorder_and_upcast_attn", "return_dict", "torchscript",
    "output_attentions", "output_hidden_states", "use_return_dict", "return_dict_in_generate",
    "use_bfloat16", "tf_legacy_loss", "use_mrope", "output_scores", "remove_invalid_values",
    # Defaults of sampling that older versions wrote into every configuration.
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty",
    "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    "num_return_sequences", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty", "decoder_start_token_id",
)  # fmt: skip
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")


def read_config(values: dict[str, Any], where: str, n_layer: int) -> tuple[str, GPTConfig]:
    """The family and the architecture.

    Args:
        values: the file's.
        n_layer: how many layers the weights have; another claim is refused before it is believed.

    Raises:
        CheckpointError: another family, a value that cannot be, or a setting that is not supported.
    """
    fields = Fields(values, where)
    family = fields.take("model_type", None)
    if not isinstance(family, str) or family not in ARCHITECTURES:
        raise CheckpointError(
            f"{where}: model_type is {brief(family)}; the families that can be imported are "
            f"{', '.join(ARCHITECTURES)}"
        )
    named = fields.take("architectures", [])
    if not isinstance(named, list) or any(each not in ARCHITECTURES[family] for each in named):
        fields.refuse(
            "architectures", f"is {brief(named)}, but of {family} only {ARCHITECTURES[family][0]} "
            "can be imported",
        )  # fmt: skip
    fields.ignore(*_NO_MATTER, *(name for name in values if name.startswith("_")))
    for name in ("is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size",
                 "is_decoder", "tie_encoder_decoder"):  # fmt: skip
        fields.only(name, False)
    fields.only("pruned_heads", {})
    fields.only("chunk_size_feed_forward", 0)
    claimed = fields.integer("n_layer" if family == "gpt2" else "num_hidden_layers")
    if claimed != n_layer:
        raise CheckpointError(f"{where} claims {claimed} layers, but the weights have {n_layer}")
    read = _gpt2 if family == "gpt2" else _llama
    try:
        config = GPTConfig(n_layer=n_layer, **read(family, fields, n_layer))
    except ConfigError as error:
        raise CheckpointError(f"{where} describes no model that can be built: {error}") from None
    fields.finish()
    return family, config


def _gpt2(family: str, fields: Fields, n_layer: int) -> dict[str, Any]:
    act = fields.text("activation_function", "gelu_new")
    if act not in (*_TANH_GELU, "gelu"):
        fields.refuse(
            "activation_function",
            f"is {brief(act)}; those that can be imported are gelu, {', '.join(_TANH_GELU)}",
        )
    fields.only("scale_attn_by_inverse_layer_idx", False)
    context, d_model = fields.integer("n_positions", 1024), fields.integer("n_embd", 768)
    fields.only("n_ctx", context)  # an older name of the same
    return {
        "vocab_size": fields.integer("vocab_size", 50257),
        "block_size": context,
        "n_head": fields.integer("n_head", 12),
        "d_model": d_model,
        "d_ff": fields.integer("n_inner", 4 * d_model),
        "position": "learned",
        "norm": "layernorm",
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "mlp": "gelu-exact" if act == "gelu" else "gelu",
        "bias": True,
        "qk_norm": False,
        "attn_scale": None if fields.flag("scale_attn_weights", True) else 1.0,
        "tie_embeddings": fields.flag("tie_word_embeddings", True),
    }


_DEFAULTS: dict[str, tuple[int, int, int, int | None, int | None]] = {
    # vocabulary, context, heads, key and value heads (None: as many), width of a head
    "llama": (32000, 2048, 32, None, None),
    "mistral": (32000, 4096 * 32, 32, 8, None),
    "qwen2": (151936, 32768, 32, 32, None),
    "qwen3": (151936, 32768, 32, 32, 128),
}
_FEED_FORWARD = {"llama": 11008, "mistral": 14336, "qwen2": 22016, "qwen3": 22016}


def _llama(family: str, fields: Fields, n_layer: int) -> dict[str, Any]:
    vocabulary, context, heads, kv_heads, head_dim = _DEFAULTS[family]
    fields.only("hidden_act", "silu", "swish")
    fields.only("rope_interleaved", False)
    context = fields.integer("max_position_embeddings", context)
    n_head = fields.integer("num_attention_heads", heads)
    # A null here is as many as n_head; only a missing field is the class's default.
    default = None if fields.has("num_key_value_heads") else kv_heads
    n_kv_head = fields.integer("num_key_value_heads", default)
    d_model = fields.integer("hidden_size", 4096)
    width = fields.integer("head_dim", head_dim)
    attention_bias = family in ("llama", "qwen3") and fields.flag("attention_bias", False)
    mlp_bias = family == "llama" and fields.flag("mlp_bias", False)
    return {
        "vocab_size": fields.integer("vocab_size", vocabulary),
        "block_size": context,
        "n_head": n_head,
        "n_kv_head": None if n_kv_head in (None, n_head) else n_kv_head,
        "d_model": d_model,
        "head_dim": None if width is not None and width * n_head == d_model else width,
        "d_ff": fields.integer("intermediate_size", _FEED_FORWARD[family]),
        "position": "rotary",
        **read_rope(fields, context),
        "pattern": _pattern(family, fields, n_layer),
        "norm": "rmsnorm",
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "mlp": "swiglu",
        "bias": attention_bias,
        "qkv_bias": True if family == "qwen2" else None,
        "mlp_bias": None if mlp_bias == attention_bias else mlp_bias,
        "qk_norm": family == "qwen3",
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
    }


def _pattern(family: str, fields: Fields, n_layer: int) -> list[str] | str:
    """Which layers look back how far. Their window counts the token itself, as ours does."""
    if family == "llama":
        fields.only("sliding_window")
        fields.only("use_sliding_window", False)
        return "causal"
    given = fields.has("sliding_window")
    window = fields.integer("sliding_window", None if given else 4096)
    if family == "mistral":
        fields.only("layer_types", ["sliding_attention" if window else "full_attention"] * n_layer)
        return f"window:{window}" if window else "causal"
    if not fields.flag("use_sliding_window", False):
        window = None
    first = fields.integer("max_window_layers", 28, least=0)
    kinds = fields.take("layer_types", None)
    if kinds is None:
        kinds = [
            "sliding_attention" if window and i >= first else "full_attention"
            for i in range(n_layer)
        ]
    if not isinstance(kinds, list) or len(kinds) != n_layer:
        fields.refuse("layer_types", f"is no list of {n_layer} kinds, one a layer")
    spelt = {"full_attention": "causal"}
    if window:
        spelt["sliding_attention"] = f"window:{window}"
    for kind in kinds:
        if kind not in spelt:
            fields.refuse(
                "layer_types", f"has {brief(kind)}, but with these settings there is only "
                f"{' and '.join(spelt)}",
            )  # fmt: skip
    return smallest_period(spelt[kind] for kind in kinds)
