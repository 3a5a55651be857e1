"""GPT: embedding, blocks, head. From ids to logits, top to bottom, in the order a reader needs it.

Radford et al., "Language models are unsupervised multitask learners", 2019, with the choices that
`gpt.config.GPTConfig` lists. The attention is in `gpt.attention`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt.attention import Attention, bias_dtype
from gpt.cache import KVCache, LayerCache
from gpt.config import GPTConfig
from gpt.conv import ShiftPlan, ShortConv
from gpt.errors import ConfigError
from gpt.loss import cap, token_nats, total_nats
from gpt.native import gradients
from gpt.norms import make_norm
from gpt.patterns import parse_patterns
from gpt.plan import AttentionPlan, LayerPlan
from gpt.positions import Alibi, LearnedPositions, sinusoidal
from gpt.rotary import RotaryTable, rotary_table

LEARNED_TERM_BY_ROWS, FIXED_TERM_BY_ROWS = 512, 1024
"""Tokens from which causal attention with a term of the scores runs by block rows: memory is then
linear in the length. Measured on CPU, 8 heads of 64, forward and backward: a learned term takes 71
against 92 ms at 512 tokens and 808 against 2,229 at 2,048, where the fused kernel has no gradient
for it; ALiBi 172 against 197 at 1,024 and as long at 2,048, without its (H, T, T) numbers. (On a
GPU the fused kernel takes a fixed term in its stride.)"""

SOFTCAP_BY_ROWS = 512
"""The same for scores that are capped, which no fused kernel does."""


class MLP(nn.Module):
    """Two matrices with a bend between them; SwiGLU has a third that opens and closes the bend."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.kind = config.mlp
        width = config.mlp_width
        inner = 2 * width if self.kind == "swiglu" else width
        self.up = nn.Linear(config.d_model, inner, bias=config.has_mlp_bias)
        self.down = nn.Linear(width, config.d_model, bias=config.has_mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(x)  # (..., F) or (..., 2F)
        if self.kind in ("gelu", "gelu-exact"):
            h = F.gelu(h, approximate="tanh" if self.kind == "gelu" else "none")
        elif self.kind == "relu2":
            kernels = gradients.suit(h)
            h = F.relu(h).square() if kernels is None else gradients.square_relu(kernels, h)
        else:
            gate, h = h.chunk(2, dim=-1)
            h = F.silu(gate) * h
        return self.down(h)  # type: ignore[no-any-return]


class Dropout(nn.Dropout):
    """Dropout, and the sum that may follow it: `onto`, if there is one, plus `scale` times it."""

    def forward(self, branch: Tensor, onto: Tensor | None = None, scale: float = 1.0) -> Tensor:
        if self.training and self.p and (kernels := gradients.suit(branch, onto)) is not None:
            return gradients.add_dropped(kernels, onto, branch, self.p, scale)
        dropped = super().forward(branch)
        return dropped if onto is None else torch.add(onto, dropped, alpha=scale)


class Tokens(NamedTuple):
    """What blocks are told of the tokens besides the stream.

    Attributes:
        ids: (B, T) or (N,) int64.
        positions: of each: (T,), (B, T) or (N,).
        shift: where convolutions find the inputs of earlier tokens in the cache, if there is one.
        x0: the stream as it entered the first block, if blocks ask for it.
    """

    ids: Tensor
    positions: Tensor
    shift: ShiftPlan | None = None
    x0: Tensor | None = None


class Block(nn.Module):
    """Attention, then MLP, each a branch that adds to the residual stream."""

    def __init__(self, config: GPTConfig, layer: int = 0) -> None:
        super().__init__()
        self.pre = config.norm_place == "pre"
        self.scale = config.residual_scale
        self.stream_scale = nn.Parameter(torch.ones(1)) if config.residual_scalars else None
        self.x0_scale = nn.Parameter(torch.zeros(1)) if config.x0_scalars else None
        self.norm_attn = make_norm(config)
        self.conv_attn = ShortConv(config) if config.conv_width else None
        self.attn = Attention(config, layer)
        self.norm_mlp = make_norm(config)
        self.conv_mlp = ShortConv(config) if config.conv_width else None
        self.mlp = MLP(config)
        self.drop = Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTable | None,
        plan: LayerPlan,
        cache: LayerCache | None,
        tokens: Tokens,
    ) -> Tensor:
        if self.stream_scale is not None:
            x = x * self.stream_scale.to(x.dtype)
        if self.x0_scale is not None and tokens.x0 is not None:
            x = torch.addcmul(x, tokens.x0, self.x0_scale.to(x.dtype))
        h = self.norm_attn(x) if self.pre else x
        if self.conv_attn is not None:
            h = self.conv_attn(h, tokens.positions, tokens.shift, _state(cache, 0))
        x = self.add(x, self.attn(h, rotary, plan, cache, tokens.ids))
        if not self.pre:
            x = self.norm_attn(x)
        h = self.norm_mlp(x) if self.pre else x
        if self.conv_mlp is not None:
            h = self.conv_mlp(h, tokens.positions, tokens.shift, _state(cache, 1))
        x = self.add(x, self.mlp(h))
        return x if self.pre else self.norm_mlp(x)

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        # A decode step is short enough for a call that does nothing to count.
        if self.training:
            # torch types the call of a module as Any.
            return self.drop(branch, x, self.scale)  # type: ignore[no-any-return]
        return torch.add(x, branch, alpha=self.scale)


def _state(cache: LayerCache | None, which: int) -> Tensor | None:
    """(slots, C) of a block's convolution ahead of its attention (0) or its MLP (1)."""
    return None if cache is None or cache.state is None else cache.state[which]


class GPT(nn.Module):
    """A decoder-only transformer.

    Args:
        config: the architecture; `vocab_size` must be known.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        if config.vocab_size < 1:
            raise ConfigError(
                "vocab_size is not set: take it from the tokenizer, config.replace(vocab_size=…)"
            )
        self.config = config
        self.activation_checkpointing = False
        """Keep only what enters each block; compute the rest again for the gradients. Training's
        affair (memory for time, the same numbers), so no part of the architecture."""
        self.pattern = parse_patterns(config.pattern)
        """Who may look at whom; repeats over the layers."""
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_pos = LearnedPositions(config) if config.position == "learned" else None
        self.drop = Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        # With norms after each branch the stream leaves the last block normalised already.
        self.norm = make_norm(config) if config.norm_place == "pre" else nn.Identity()
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal weights, zero biases. The 2 * n_layer branches add up in the stream, so the matrix
        that ends each starts 1/sqrt(2 * n_layer) smaller, to keep the sum's variance (GPT-2), or
        at 0 if the architecture says so. Convolutions and scalars are left as they were made."""
        std = self.config.init_std
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends_branch = name.endswith(("attn.out", "mlp.down"))
                scale = (2 * self.config.n_layer) ** -0.5 if ends_branch else 1.0
                if ends_branch and self.config.zero_init:
                    scale = 0.0
                nn.init.normal_(module.weight, std=std * scale)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self,
        ids: Tensor,
        plan: AttentionPlan | None = None,
        cache: KVCache | None = None,
        targets: Tensor | None = None,
        *,
        each: bool = False,
    ) -> Tensor:
        """Logits of the next token, or what they say of the tokens that come next.

        Args:
            ids: (B, T) int64 whole sequences, or (N,) tokens of a paged plan.
            plan: who may look at whom; None: B whole sequences under the model's own pattern.
            cache: earlier keys and values, read and extended in place; None: there are none.
            targets: (B, T) int64, the next tokens; `gpt.loss.IGNORE` counts for nothing.
            each: whether the nats of each target are wanted, not their sum.

        Returns:
            (B, T, V), or (M, V) for the rows in `plan.logit_rows`. With targets their negative
            log-likelihood, () or (B, T); of a large vocabulary no more than a share of the logits
            exists at a time then (`gpt.loss`).
        """
        x = self.hidden(ids, plan, cache)
        if targets is None:
            return self.logits(x, plan)
        nats = token_nats if each else total_nats
        found = nats(
            x.flatten(0, -2), self.head.weight, targets.flatten(), softcap=self.config.logit_softcap
        )
        return found.view(targets.shape) if each else found

    def hidden(
        self, ids: Tensor, plan: AttentionPlan | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """The residual stream after the last block and norm: (B, T, C) or (N, C)."""
        if plan is None:
            B, T = ids.shape
            if self.config.block_size < T:
                raise ValueError(f"{T} tokens, but the context holds {self.config.block_size}")
            plan = AttentionPlan.dense(B, T, pattern=self.pattern, device=ids.device)
        if cache is not None and self.config.conv_width and plan.shift is None:
            raise ValueError("the plan was made without conv_width, but the model has convolutions")
        if self.config.attn_softcap is not None:
            plan = plan.by_block_rows(SOFTCAP_BY_ROWS)
        x = self.embed(ids)  # (..., C)
        rotary = None
        if self.config.position == "rotary":
            rotary = rotary_table(plan.positions, self.config, x.dtype)
        elif self.embed_pos is not None:
            x = x + self.embed_pos(plan.positions)
        elif self.config.position == "sinusoidal":
            C = self.config.d_model
            x = x * C**0.5 + sinusoidal(plan.positions, C, x.dtype)
        elif self.config.position == "relative":
            plan = plan.by_block_rows(LEARNED_TERM_BY_ROWS)
        elif self.config.position == "alibi":
            if x.device.type == "cpu":
                plan = plan.by_block_rows(FIXED_TERM_BY_ROWS)
            alibi, dtype = Alibi(self.config.n_head), bias_dtype(x)
            plan = plan.with_bias(lambda q_pos, k_pos: alibi.bias(q_pos, k_pos, dtype))
        x = self.drop(x)
        tokens = Tokens(ids, plan.positions, plan.shift, x if self.config.x0_scalars else None)
        recompute = self.activation_checkpointing and torch.is_grad_enabled() and cache is None
        for i, block in enumerate(self.blocks):
            if recompute:  # Chen et al., arXiv 1604.06174; dropout draws the same numbers again
                x = checkpoint(block, x, rotary, plan.layer(i), None, tokens, use_reentrant=False)
            else:
                own = None if cache is None else cache.layer(i)
                x = block(x, rotary, plan.layer(i), own, tokens)
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, x: Tensor, plan: AttentionPlan | None = None) -> Tensor:
        """Scores over the vocabulary for the stream x, or for the plan's `logit_rows` of it."""
        if plan is not None and plan.logit_rows is not None:
            x = x[plan.logit_rows]
        return cap(self.head(x), self.config.logit_softcap)

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def num_params(self) -> int:
        """Trained numbers; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())
