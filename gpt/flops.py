"""How much arithmetic a model takes, counted exactly from its configuration.

The convention is that of MFU, "model FLOPs utilization" (Chowdhery et al., PaLM, arXiv 2204.02311,
appendix B): a multiplication and its addition are two FLOPs, and only matrix products count: every
linear layer, the head included, the short convolutions, and the two products of attention (scores,
and the mix of values). Norms, activations, softmax, look-ups and the optimizer are left out. A
backward pass takes twice the forward: each product has one for either operand. What is computed
again to save memory does not count.

One thing differs from PaLM's formula, to our disadvantage: attention counts the keys that a token
may look at, half of the full square for the causal pattern, since the other half is never needed.
Without attention, and with the embedding counted as if it were a product, this is the well-known
"6 N a token" (Kaplan et al., arXiv 2001.08361, section 2.1).
"""

from __future__ import annotations

from dataclasses import dataclass

from gpt.config import GPTConfig
from gpt.patterns import parse_patterns

BACKWARD_PER_FORWARD = 2


@dataclass(frozen=True)
class Flops:
    """FLOPs of one token's forward pass, as a mean over the positions of a sequence.

    Attributes:
        blocks: the linear layers of all blocks.
        attention: scores and mixes of values.
        head: the product with the vocabulary.
    """

    blocks: float
    attention: float
    head: float

    @property
    def forward(self) -> float:
        return self.blocks + self.attention + self.head

    @property
    def training(self) -> float:
        """Forward and backward."""
        return (1 + BACKWARD_PER_FORWARD) * self.forward

    @property
    def adapting(self) -> float:
        """The same with frozen matrices: their products need one operand's gradient, not both. What
        is learned beside them (`gpt.lora`) is left out, about a hundredth."""
        return self.training - self.blocks - self.head


def flops_per_token(config: GPTConfig, length: int | None = None) -> Flops:
    """What a token costs in a sequence of `length` tokens.

    Args:
        length: tokens of the sequence; None: the whole context, as in training.
    """
    length = config.block_size if length is None else length
    C, D = config.d_model, config.head_width
    heads, groups = config.n_head, config.kv_heads
    qkv = C * (heads + 2 * groups) * D
    out = heads * D * C
    # SwiGLU's gate is one more matrix of the width of the first.
    mlp = (3 if config.mlp == "swiglu" else 2) * C * config.mlp_width
    convolutions = 2 * C * config.conv_width
    # Relative keys: each query with the key of each distance.
    distances = config.relative_distance + 1 if config.position == "relative" else 0
    scores_and_mix = 2 * heads * D * mean_keys(config, length)
    return Flops(
        blocks=2.0 * config.n_layer * (qkv + out + mlp + convolutions + distances * heads * D),
        attention=2.0 * config.n_layer * scores_and_mix,
        head=2.0 * C * config.vocab_size,
    )


def mean_keys(config: GPTConfig, length: int) -> float:
    """Keys that a token may look at, as a mean over the positions of `length` tokens and layers."""
    patterns = parse_patterns(config.patterns)
    pairs = {pattern: pattern.pairs(length) for pattern in patterns.kinds}
    of_layers = [pairs[patterns.of_layer(i)] for i in range(config.n_layer)]
    return sum(of_layers) / (config.n_layer * length)
