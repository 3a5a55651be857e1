"""GPT: embedding, blocks, head. From ids to logits, top to bottom, in the order a reader needs it.

Radford et al., "Language models are unsupervised multitask learners", 2019, with the choices that
`gpt.config.GPTConfig` lists. The attention is in `gpt.attention`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt.attention import Attention, bias_dtype
from gpt.cache import KVCache, LayerCache
from gpt.config import GPTConfig
from gpt.errors import ConfigError
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
            h = F.relu(h).square()
        else:
            gate, h = h.chunk(2, dim=-1)
            h = F.silu(gate) * h
        return self.down(h)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then MLP, each a branch that adds to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.pre = config.norm_place == "pre"
        self.scale = config.residual_scale
        self.norm_attn = make_norm(config)
        self.attn = Attention(config)
        self.norm_mlp = make_norm(config)
        self.mlp = MLP(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        rotary: RotaryTable | None,
        plan: LayerPlan,
        cache: LayerCache | None,
    ) -> Tensor:
        if self.pre:
            x = self.add(x, self.attn(self.norm_attn(x), rotary, plan, cache))
            return self.add(x, self.mlp(self.norm_mlp(x)))
        x = self.norm_attn(self.add(x, self.attn(x, rotary, plan, cache)))
        return self.norm_mlp(self.add(x, self.mlp(x)))  # type: ignore[no-any-return]

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        # A decode step is short enough for a call that does nothing to count.
        branch = self.drop(branch) if self.training else branch
        return torch.add(x, branch, alpha=self.scale)


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
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        # With norms after each branch the stream leaves the last block normalised already.
        self.norm = make_norm(config) if config.norm_place == "pre" else nn.Identity()
        self.head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Normal weights, zero biases. The 2 * n_layer branches add up in the stream, so the matrix
        that ends each starts 1/sqrt(2 * n_layer) smaller, to keep the sum's variance (GPT-2)."""
        std = self.config.init_std
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                ends_branch = name.endswith(("attn.out", "mlp.down"))
                scale = (2 * self.config.n_layer) ** -0.5 if ends_branch else 1.0
                nn.init.normal_(module.weight, std=std * scale)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(
        self, ids: Tensor, plan: AttentionPlan | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """Logits of the next token.

        Args:
            ids: (B, T) int64 whole sequences, or (N,) tokens of a paged plan.
            plan: who may look at whom; None: B whole sequences under the model's own pattern.
            cache: earlier keys and values, read and extended in place; None: there are none.

        Returns:
            (B, T, V), or (M, V) for the rows in `plan.logit_rows`.
        """
        return self.logits(self.hidden(ids, plan, cache), plan)

    def hidden(
        self, ids: Tensor, plan: AttentionPlan | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """The residual stream after the last block and norm: (B, T, C) or (N, C)."""
        if plan is None:
            B, T = ids.shape
            if self.config.block_size < T:
                raise ValueError(f"{T} tokens, but the context holds {self.config.block_size}")
            plan = AttentionPlan.dense(B, T, pattern=self.pattern, device=ids.device)
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
        recompute = self.activation_checkpointing and torch.is_grad_enabled() and cache is None
        for i, block in enumerate(self.blocks):
            if recompute:  # Chen et al., arXiv 1604.06174; dropout draws the same numbers again
                x = checkpoint(block, x, rotary, plan.layer(i), None, use_reentrant=False)
            else:
                x = block(x, rotary, plan.layer(i), None if cache is None else cache.layer(i))
        return self.norm(x)  # type: ignore[no-any-return]

    def logits(self, x: Tensor, plan: AttentionPlan | None = None) -> Tensor:
        """Scores over the vocabulary for the stream x, or for the plan's `logit_rows` of it."""
        if plan is not None and plan.logit_rows is not None:
            x = x[plan.logit_rows]
        logits: Tensor = self.head(x)
        if self.config.logit_softcap is not None:
            logits = self.config.logit_softcap * torch.tanh(logits / self.config.logit_softcap)
        return logits

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def num_params(self) -> int:
        """Trained numbers; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())
