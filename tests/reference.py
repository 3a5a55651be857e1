"""An independent reference: a GPT in float64 numpy, written from the formulas with plain loops.

Nothing here is shared with the package but the configuration, so a fault of ours cannot hide in
both.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from gpt.config import GPTConfig


def may_look(pattern: str, q: int, k: int) -> bool:
    """Whether position q may look at position k, from the definitions in words."""
    if k > q:
        return False
    if pattern.startswith("tests.strategies:Beside(3"):
        return k >= q - 3 or k == 1
    kind, *numbers = pattern.replace("+sinks", "").replace("+global", "").split(":")
    n = [int(number) for number in numbers]
    if kind == "causal":
        return True
    if kind == "window":
        return k in range(q - n[0] + 1, q + 1) or (len(n) == 2 and k in range(n[1]))
    if kind == "dilated":
        return k in [q - n[1] * back for back in range(n[0])]
    if kind == "fixed":
        own = list(range(q - q % n[0], q + 1))
        ends = [end - back for end in range(n[0], q + 1, n[0]) for back in range(1, n[1] + 1)]
        return k in own or k in ends
    assert kind == "bigbird"
    width, sinks, count, seed = n
    return k > q - width or k < sinks or k // 64 in random_blocks(seed, count, q // 64)


@functools.cache
def random_blocks(seed: int, count: int, row: int) -> set[int]:
    """Floyd's sampling by SplitMix64, in numpy's own 64-bit arithmetic."""

    def mix(x: np.uint64) -> np.uint64:
        with np.errstate(over="ignore"):
            x = x + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            return x ^ (x >> np.uint64(31))

    found: set[int] = set(range(row)) if row <= count else set()
    state = mix(mix(np.uint64(seed)) ^ np.uint64(row))
    for top in range(row - count, row) if row > count else ():
        state = mix(state)
        pick = int(state) % (top + 1)
        found.add(pick if pick not in found else top)
    return found


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    pattern: str,
    q_start: int = 0,
    term: Callable[[int, np.ndarray, int], float] = lambda h, q, distance: 0.0,
    cap: float | None = None,
) -> np.ndarray:
    """(t, H, D) queries at positions q_start and up against (s, K, D) keys at 0 and up. `term` is
    added to a head's score of a query for a key at some distance, once that is capped."""

    def bend(score: float) -> float:
        return score if cap is None else cap * math.tanh(score / cap)

    t, H, D = q.shape
    s, K, _ = k.shape
    out = np.zeros((t, H, D))
    for i in range(t):
        for h in range(H):
            kv = h // (H // K)
            seen = [j for j in range(s) if may_look(pattern, q_start + i, j)]
            scores = [
                bend(scale * math.fsum(q[i, h] * k[j, kv])) + term(h, q[i, h], q_start + i - j)
                for j in seen
            ]
            weights = np.exp(np.array(scores) - max(scores))
            weights /= weights.sum()
            out[i, h] = sum(w * v[j, kv] for w, j in zip(weights, seen, strict=True))
    return out


def frequency(config: GPTConfig, i: int) -> float:
    """Radians a token by which pair i of a head turns."""
    R, base, s = config.rope_width, config.rope_base, config.rope_factor
    f = base ** (-2 * i / R)
    if config.rope_scaling == "linear":
        return f / s
    if config.rope_scaling == "ntk":
        return (base * s ** (R / (R - 2))) ** (-2 * i / R)
    if config.rope_scaling == "llama3":
        L, wave = config.rope_original_block_size, 2 * math.pi / f
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        if wave < L / high:
            return f
        if wave > L / low:
            return f / s
        smooth = (L / wave - low) / (high - low)
        return (1 - smooth) * f / s + smooth * f
    if config.rope_scaling == "yarn":
        L = config.rope_original_block_size
        # Pair x turns L / (2 pi base**(2x/R)) times; solved for x.
        ends = [
            R / 2 * math.log(L / (2 * math.pi * turns), base)
            for turns in (config.rope_beta_fast, config.rope_beta_slow)
        ]
        if config.rope_truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], R - 1)
        ramp = min(1.0, max(0.0, (i - first) / (last - first or 0.001)))
        return ramp * f / s + (1 - ramp) * f
    return f


def turn(x: np.ndarray, config: GPTConfig) -> np.ndarray:
    """Rotary positions by complex numbers: a pair is one, turned by its angle."""
    R, y = config.rope_width, x.copy()
    size = 1.0
    if config.rope_scaling == "yarn":
        size = config.rope_attention_factor or 0.1 * math.log(config.rope_factor) + 1
    for i in range(R // 2):
        a, b = (2 * i, 2 * i + 1) if config.rope_layout == "interleaved" else (i, i + R // 2)
        for p in range(len(x)):
            z = (x[p, :, a] + 1j * x[p, :, b]) * size * np.exp(1j * p * frequency(config, i))
            y[p, :, a], y[p, :, b] = z.real, z.imag
    return y


def waves(length: int, width: int) -> np.ndarray:
    """Sinusoidal positions."""
    table = np.zeros((length, width))
    for p in range(length):
        for i in range(width // 2):
            table[p, 2 * i] = math.sin(p / 10000 ** (2 * i / width))
            table[p, 2 * i + 1] = math.cos(p / 10000 ** (2 * i / width))
    return table


def slopes(heads: int) -> list[float]:
    """ALiBi's: a geometric sequence; between powers of two, filled up from the next one's."""
    if heads & (heads - 1) == 0:
        return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]
    below = 2 ** int(math.log2(heads))
    return slopes(below) + slopes(2 * below)[::2][: heads - below]


def rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def gpt(config: GPTConfig, state: dict[str, np.ndarray], ids: list[int]) -> np.ndarray:
    """(T, V) logits of a GPT with these weights, dropout off."""
    H, K, D = config.n_head, config.kv_heads, config.head_width

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        y = x @ state[f"{name}.weight"].T
        part = name.split(".", 2)[2]  # of blocks.0.attn.qkv
        said = {"attn.qkv": config.qkv_bias, "mlp.up": config.mlp_bias, "mlp.down": config.mlp_bias}
        biased = config.bias if said.get(part) is None else said[part]
        return y + state[f"{name}.bias"] if biased else y

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        weight = state[f"{name}.weight"]
        if config.norm == "rmsnorm":
            return rms(x, weight, config.norm_eps)
        centred = x - x.mean(-1, keepdims=True)
        y = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.norm_eps) * weight
        return y + state[f"{name}.bias"] if config.bias else y

    def attend(x: np.ndarray, name: str) -> np.ndarray:
        qkv = linear(x, f"{name}.qkv").reshape(len(ids), H + 2 * K, D)
        q, k, v = qkv[:, :H], qkv[:, H : H + K], qkv[:, H + K :]
        if config.qk_norm:
            q = rms(q, state[f"{name}.q_norm.weight"], config.norm_eps)
            k = rms(k, state[f"{name}.k_norm.weight"], config.norm_eps)
        if config.position == "rotary":
            q, k = turn(q, config), turn(k, config)
        layer = int(name.split(".")[1])
        if config.value_embeddings and (config.n_layer - 1 - layer) % 2 == 0:
            table, amount = state[f"{name}.values.embed.weight"], state[f"{name}.values.scale"][0]
            v = v + np.stack([amount * table[i].reshape(K, D) for i in ids])
        scale = config.attn_scale or 1 / math.sqrt(D)

        def term(h: int, q: np.ndarray, distance: int) -> float:
            if config.position == "alibi":
                return -slopes(H)[h] * distance
            if config.position == "relative":
                far = min(distance, config.relative_distance)
                return scale * math.fsum(q * state[f"{name}.term.keys.weight"][far])
            return 0.0

        patterns = [config.pattern] if isinstance(config.pattern, str) else config.pattern
        y = attention(q, k, v, scale, patterns[layer % len(patterns)], 0, term, config.attn_softcap)
        return linear(y.reshape(len(ids), H * D), f"{name}.out")

    def mlp(x: np.ndarray, name: str) -> np.ndarray:
        h = linear(x, f"{name}.up")
        if config.mlp == "gelu":
            h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        elif config.mlp == "gelu-exact":
            h = h * np.vectorize(lambda z: 0.5 * (1 + math.erf(z / math.sqrt(2))))(h)
        elif config.mlp == "relu2":
            h = np.where(h > 0, h, 0) ** 2
        else:
            gate, h = np.split(h, 2, axis=-1)
            h = gate / (1 + np.exp(-gate)) * h
        return linear(h, f"{name}.down")

    def conv(x: np.ndarray, name: str) -> np.ndarray:
        if not config.conv_width:
            return x
        weight = state[f"{name}.weight"]
        y = x.copy()
        for p in range(len(x)):
            for j in range(min(config.conv_width, p + 1)):
                y[p] += weight[:, 0, j] * x[p - j]
        return y

    x = state["embed.weight"][ids]
    if config.position == "learned":
        x = x + state["embed_pos.weight"][: len(ids)]
    if config.position == "sinusoidal":
        x = math.sqrt(config.d_model) * x + waves(len(ids), config.d_model)
    x0 = x
    for i in range(config.n_layer):
        block = f"blocks.{i}"
        if config.residual_scalars:
            x = state[f"{block}.stream_scale"][0] * x
        if config.x0_scalars:
            x = x + state[f"{block}.x0_scale"][0] * x0
        for name, branch in (("attn", attend), ("mlp", mlp)):
            before = config.norm_place == "pre"
            h = norm(x, f"{block}.norm_{name}") if before else x
            h = branch(conv(h, f"{block}.conv_{name}"), f"{block}.{name}")
            x = x + config.residual_scale * h
            x = x if before else norm(x, f"{block}.norm_{name}")
    if config.norm_place == "pre":
        x = norm(x, "norm")
    logits = x @ state["head.weight"].T
    if config.logit_softcap:
        logits = config.logit_softcap * np.tanh(logits / config.logit_softcap)
    return logits
