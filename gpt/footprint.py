"""The memory that training takes, estimated before it is taken.

    peak = weights + optimizer + average + (1 + slack) · the largest of
             end of the forward     gradients of the last step + kept + logits
             the loss's backward    gradients, if they accumulate + kept + logits' gradients
             a layer computed again gradients + layers' inputs + one layer whole
             evaluation             gradients + logits
             a step of Muon         gradients + five times the matrices it works on

**Weights, gradients** and the two means of AdamW are as many numbers as the model has parameters,
in float32 unless the run is `bf16-true`. The gradients of a step live until the next backward
begins. With LoRA only the adapters have gradients and means, a hundredth of that; what is kept of
the forward is a little less than the formula says, since frozen norms need no input of their own.
Muon keeps one mean of its matrices' gradients, and a number for each of their neurons.

**Kept** is what autograd keeps of the forward for the backward. In units of (batch × block) tokens,
with C = d_model, F = d_ff, q = n_head · head_dim, k = n_kv_head · head_dim, one layer keeps

    2 · norm(C) + (q + 2k) + turned(q + k) + qk_norm(q + k) + q + m·F (+ 2C dropout)

numbers: what goes into each norm and comes out of it, the projections, queries and keys once more
where they are normalised or turned, what attention returns, and what the MLP goes through (m = 2,
for SwiGLU 4). An RMSNorm keeps its input twice, the second time normalised. Under bf16 the linear
layers keep two bytes a number and the norms four. Around the layers there is the final norm and, in
float32, a probability per word of the vocabulary. A pattern that runs by block rows keeps float32
copies of queries, keys, values and what comes out; a masked one a float mask of block × block a
layer, `alibi` one of n_head · block × block in all (block rows need none), `relative` below 512
tokens the weights of every head and sequence, `attn_softcap` those and the tanh. Mixed precision
keeps a bf16 copy of each matrix. With activation checkpointing a layer keeps only its input, and is
whole one at a time.

**Logits** come in float32 once forward, and twice backward beside the probabilities kept: for small
models with large vocabularies they are most of it. From a size on (`gpt.shares`) there is only a
share of them, no probability is kept, and instead the gradients of the stream and of the head's
matrix are made in the forward and kept to the backward.

**Slack**: what comes and goes each step leaves holes. The live tensors were within 3 % of the
formula on models of 1 to 14 M parameters; the process held 0.4 of what comes and goes besides, and
up to 0.1 GiB (glibc's allocator). torch's own allocator on a GPU holds less.

What torch compiles keeps less, so this is the upper end then. `tests/test_footprint.py` holds the
kept part to what autograd really keeps of torch's operations, and that of our own kernels to no
more.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpt.config import GPTConfig
from gpt.patterns import Pattern, parse_patterns
from gpt.shares import in_shares, share_tokens
from gpt.size import matrix_count, neuron_count, parameter_count

LIBRARIES = 550 * 2**20
"""What Python, torch and Lightning take themselves, with holes; a CUDA context takes as much."""
CPU_SLACK, GPU_SLACK = 0.4, 0.15
MUON_AT_ONCE = 2**26
"""Numbers of the matrices that Muon works on at a time: bounds the memory of a step."""


@dataclass(frozen=True)
class Training:
    """What a training step works on, per process.

    Attributes:
        batch_size: blocks of one forward.
        eval_batch_size: blocks of one forward in evaluation.
        precision: Lightning's name: `32-true`, `bf16-mixed`, `bf16-true`, `16-mixed`, `64-true`.
        accumulate: forwards per step.
        checkpointing: whether blocks are computed again for the gradients.
        average: whether a running average of the weights is kept.
        block_size: tokens of a block; None: the model's context.
        adapters: numbers that are trained beside frozen weights (`gpt.lora`); None: all are.
        muon: whether Muon trains the matrices of the blocks, which keeps little more than one
            number for each, not two, and works on some of them at a time.
        device: kind of it, which says how large a share of the logits is (`gpt.shares`).
    """

    batch_size: int
    eval_batch_size: int | None = None
    precision: str = "32-true"
    accumulate: int = 1
    checkpointing: bool = False
    average: bool = False
    block_size: int | None = None
    adapters: int | None = None
    muon: bool = False
    device: str = "cpu"

    @property
    def trained_bytes(self) -> int:
        """Of one number that is trained. Adapters are never in half precision."""
        return self.weight_bytes if self.adapters is None else self.exact_bytes

    @property
    def weight_bytes(self) -> int:
        """Of one parameter."""
        if self.precision.startswith("64"):
            return 8
        return 2 if self.precision.endswith("16-true") else 4

    @property
    def product_bytes(self) -> int:
        """Of one number that a linear layer takes or gives."""
        return 2 if "16" in self.precision else self.weight_bytes

    @property
    def exact_bytes(self) -> int:
        """Of one number where half precision is not enough: norms and the loss."""
        return max(4, self.weight_bytes)


@dataclass(frozen=True)
class Footprint:
    """Bytes of a training process at its largest, by what they are for.

    Attributes:
        gradients, activations, logits: at the moment of the step when they are most together.
        slack: what the allocator holds besides.
    """

    weights: int
    optimizer: int
    average: int
    gradients: int
    activations: int
    logits: int
    slack: int

    @property
    def peak(self) -> int:
        """Without `LIBRARIES`."""
        return (
            self.weights + self.optimizer + self.average
            + self.gradients + self.activations + self.logits + self.slack
        )  # fmt: skip


def footprint(config: GPTConfig, training: Training, *, slack: float = CPU_SLACK) -> Footprint:
    """The estimate, by the formulas of this module.

    Args:
        slack: held beside what comes and goes, as a share of it.
    """
    n = parameter_count(config)
    if training.block_size is not None:
        config = config.replace(block_size=training.block_size)
    trained = training.trained_bytes * (n if training.adapters is None else training.adapters)
    V, word, exact = config.vocab_size, training.product_bytes, training.exact_bytes
    tokens = training.batch_size * config.block_size
    copied = matrix_count(config)
    if in_shares(tokens, V, training.device):  # the head's is there while the loss is made
        copied -= V * config.d_model
    copies = 0 if word == training.weight_bytes else word * copied
    gradients = trained
    kept = kept_bytes(config, training) + copies
    forward = V * (exact if word == exact else word + exact)  # a float32 copy of half logits
    seen = (training.eval_batch_size or training.batch_size) * config.block_size
    backward = tokens * V * 2 * exact
    at_once = share_tokens(V, training.device)
    if in_shares(tokens, V, training.device):
        # Logits and their exponentials; the backward pass multiplies what is there by a number.
        tokens_at_once, backward = min(tokens, at_once), V * config.d_model * exact
        forward += V * exact
    else:
        tokens_at_once = tokens
    if in_shares(seen, V, training.device):
        seen = min(seen, at_once)
    phases = [
        (gradients, kept, tokens_at_once * forward),
        (gradients if training.accumulate > 1 else 0, kept, backward),
        (gradients, 0, seen * V * (word + exact)),
    ]
    if training.checkpointing:
        whole = max(_layers(config, training))
        inputs = config.n_layer * tokens * _stream_bytes(config, training)
        inputs += _shared_bytes(config, training)
        phases.append((gradients, inputs + whole + copies, 0))
    by_muon = neurons = 0
    if training.muon:
        by_muon, neurons = matrix_count(config) - V * config.d_model, neuron_count(config)
        # Updates, and the buffers of the iteration.
        phases.append((gradients, 5 * training.exact_bytes * min(by_muon, MUON_AT_ONCE), 0))
    largest = max(phases, key=sum)
    return Footprint(
        weights=training.weight_bytes * n + (0 if training.adapters is None else trained),
        optimizer=2 * trained - training.weight_bytes * by_muon + training.exact_bytes * neurons,
        average=4 * trained // training.trained_bytes if training.average else 0,
        gradients=largest[0],
        activations=largest[1],
        logits=largest[2],
        slack=int(slack * sum(largest)),
    )


def kept_bytes(config: GPTConfig, training: Training) -> int:
    """What autograd keeps of one forward, but for weights and their copies."""
    tokens = training.batch_size * config.block_size
    C, exact, word = config.d_model, training.exact_bytes, training.product_bytes
    if training.checkpointing:
        layers = config.n_layer * tokens * _stream_bytes(config, training)
    else:
        layers = sum(_layers(config, training))
    shares = in_shares(tokens, config.vocab_size, training.device)
    around = 0 if shares else config.vocab_size * exact
    around += _norm_bytes(config, training) if config.norm_place == "pre" else C * word
    if config.logit_softcap is not None and not shares:
        around += config.vocab_size * word
    if config.dropout:
        around += C * word
    head = exact * C * config.vocab_size + tokens * _stream_bytes(config, training) if shares else 0
    return layers + _shared_bytes(config, training) + tokens * around + head


def _layers(config: GPTConfig, training: Training) -> list[int]:
    """Kept by each layer for all tokens."""
    tokens = training.batch_size * config.block_size
    alike = tokens * _layer_bytes(config, training)
    patterns = parse_patterns(config.patterns)
    own = {pattern: _pattern_bytes(config, training, pattern) for pattern in patterns.kinds}
    return [alike + own[patterns.of_layer(i)] for i in range(config.n_layer)]


def _layer_bytes(config: GPTConfig, training: Training) -> int:
    """Kept by one layer for one token, whatever its pattern."""
    exact, word = training.exact_bytes, training.product_bytes
    queries = config.n_head * config.head_width
    keys = config.kv_heads * config.head_width
    mlp = (4 if config.mlp == "swiglu" else 2) * config.mlp_width
    total = 2 * _norm_bytes(config, training)
    total += word * (queries + 2 * keys + queries + mlp) + exact * config.n_head
    if config.position == "rotary" or config.qk_norm:
        total += word * (queries + keys)
    if config.qk_norm:
        # Half precision is left for the norm: its input is kept once more, widened.
        total += exact * (queries + keys) * (1 if word == exact else 2)
    if config.dropout:
        total += 2 * word * config.d_model
    if config.residual_scalars:
        total += _stream_bytes(config, training)
    if config.conv_width:  # what goes into each of the two, padded, and what comes out
        total += 4 * _stream_bytes(config, training)
    if config.attn_dropout:  # the plain kernel: scores, weights, and what was dropped
        total += 3 * exact * config.n_head * config.block_size
    return total


def _stream_bytes(config: GPTConfig, training: Training) -> int:
    """The residual stream of one token: mixed precision leaves it in float32."""
    word, exact = training.product_bytes, training.exact_bytes
    return config.d_model * (word if word == training.weight_bytes else exact)


def _norm_bytes(config: GPTConfig, training: Training) -> int:
    """What goes into a norm of the stream, and what comes out."""
    exact, word = training.exact_bytes, training.product_bytes
    if config.norm == "layernorm":
        return _stream_bytes(config, training) + config.d_model * word
    return config.d_model * (2 * exact + word)


def _pattern_bytes(config: GPTConfig, training: Training, pattern: Pattern) -> int:
    """Kept by one layer besides, for all tokens, because of what it may see and of terms."""
    exact, word = training.exact_bytes, training.product_bytes
    square = config.block_size**2
    tokens = training.batch_size * config.block_size
    queries = config.n_head * config.head_width
    keys = config.kv_heads * config.head_width
    if _by_rows(config, pattern):  # copies in float32 of all that goes in and comes out, and sums
        copies = exact * (2 * queries + 2 * keys + config.n_head)
        instead = word * (queries + keys) if config.position == "rotary" or config.qk_norm else 0
        if not (config.qk_norm and word == exact):  # the norm's input, otherwise
            instead += word * (queries + 2 * keys)
        return tokens * (copies - instead)
    plain = pattern.causal_until >= config.block_size
    if config.attn_softcap is not None and not config.attn_dropout:
        # Two products: tanh and weights of the square, and queries, keys and values by heads.
        scores = config.n_head * config.block_size * (2 * exact + (word if word < exact else 0))
        held = config.qk_norm and word == exact
        copies = word * keys - (0 if held else word * (queries + 2 * keys))
        if config.position != "rotary" and not config.qk_norm:
            copies += word * (queries + keys)
        return tokens * (scores + copies - exact * config.n_head) + square
    if config.position == "relative":
        # The plain kernel: scaled copies of what goes in, distances as int64, the mask, weights.
        weights = 0 if config.attn_dropout else exact * config.n_head * config.block_size
        return tokens * (4 * word * queries + weights) + 9 * square
    # A pattern that the fused kernel cannot draw itself is a table of what may be added.
    return 0 if plain or config.position == "alibi" else word * square


def _by_rows(config: GPTConfig, pattern: Pattern) -> bool:
    """Whether the plan takes block rows: see SPARSE_FROM and SPARSE_SHARE in `gpt.plan`, and
    LEARNED_TERM_BY_ROWS in `gpt.model`."""
    if config.block_size < 512 or config.attn_dropout:
        return False
    if pattern.causal_until >= config.block_size:
        return config.position == "relative" or config.attn_softcap is not None
    # Blocks are a bit coarser than pairs.
    return pattern.pairs(config.block_size) < 0.45 * config.block_size**2


def _shared_bytes(config: GPTConfig, training: Training) -> int:
    """A term of the scores that all layers share; autocast alone makes it in half precision."""
    if config.position != "alibi":
        return 0
    mixed = training.product_bytes < training.weight_bytes
    number = training.product_bytes if mixed else training.exact_bytes
    return number * config.n_head * config.block_size**2
