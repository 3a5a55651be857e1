"""What in a diagnosis calls for a warning, and which setting usually helps.

A rule turns a snapshot into one number for each place (a head, a block, the run), larger meaning
worse. A place is ill once the number has passed `on` in several snapshots running, and well again
only below `off`: a number that hovers about a threshold gives one warning, not ten. Each rule
speaks once for all the places that are ill, and not again for a while.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from gpt.config import GPTConfig
from gpt.diagnosis import LayerReport
from gpt.training.optim import OptimizerConfig

SETTLE_STEPS = 200
"""Heads may be anything while weights are still near their initial values."""

QUIET_STEPS = 1000
"""Between two warnings of one rule."""

STALL_STEPS = 300
"""Without progress that is worth a warning, after the warm-up."""

PROGRESS = 0.02
"""Nats per token; the mean of a few dozen batches is no surer than that."""

POSITIONAL = 0.9
"""Weight at one distance from which on a sharp head is a useful one: it reads the token before."""

Place = tuple[int | None, int | None]
"""Block and head; None: all of them."""


@dataclass(frozen=True)
class Snapshot:
    """One diagnosis.

    Attributes:
        step: optimizer steps done.
        loss: mean of the training loss since the last snapshot, nats per token.
        gradients: norms before clipping, as `gpt.diagnosis.gradient_norms` names them.
        layers: what the probe showed, block by block.
    """

    step: int
    loss: float
    gradients: dict[str, float]
    layers: list[LayerReport]


@dataclass(frozen=True)
class Setting:
    """What a snapshot is judged by.

    Attributes:
        model, optimizer: as configured.
        unigram: nats per token of a model that knows how frequent tokens are and nothing else.
    """

    model: GPTConfig
    optimizer: OptimizerConfig
    unigram: float = math.inf

    @property
    def settled(self) -> int:
        return max(SETTLE_STEPS, self.optimizer.warmup_steps)


@dataclass(frozen=True)
class Rule:
    """One kind of illness.

    Attributes:
        kind: its name in the run's record.
        values: badness by place.
        on, off: where a place turns ill, and where well again.
        patience: snapshots running that it takes.
        early: judged from the first step; otherwise only when weights have settled.
        finding: what is seen.
        advice: what usually helps, given how the run is set up.
    """

    kind: str
    values: Callable[[Snapshot, Setting], Iterator[tuple[Place, float]]]
    on: float
    off: float
    finding: str
    advice: Callable[[Setting], str]
    patience: int = 2
    early: bool = False


# --- What is seen --------------------------------------------------------------------------------


def _by_head(
    value: Callable[[LayerReport, int], float],
) -> Callable[..., Iterator[tuple[Place, float]]]:
    def values(seen: Snapshot, _: Setting) -> Iterator[tuple[Place, float]]:
        for i, layer in enumerate(seen.layers):
            for head in range(len(layer.entropy)):
                yield (i, head), value(layer, head)

    return values


def _by_layer(
    value: Callable[[LayerReport, Setting], float],
) -> Callable[..., Iterator[tuple[Place, float]]]:
    def values(seen: Snapshot, setting: Setting) -> Iterator[tuple[Place, float]]:
        for i, layer in enumerate(seen.layers):
            yield (i, None), value(layer, setting)

    return values


def _collapse(layer: LayerReport, head: int) -> float:
    sharp = 1 - layer.entropy_share[head] if layer.offset[head] < POSITIONAL else 0.0
    return max(sharp, layer.fixed[head])


def _dead(layer: LayerReport, head: int) -> float:
    """Above 1: under a hundredth of what heads of the layer add, or nothing beside the stream."""
    usual = sum(layer.head_rms) / len(layer.head_rms)
    return _over(max(0.01 * usual, _nothing(layer)), layer.head_rms[head])


def _idle(layer: LayerReport, _: Setting) -> float:
    return _over(_nothing(layer), max(layer.attn_rms, layer.mlp_rms))


def _nothing(layer: LayerReport) -> float:
    """What makes no difference beside the stream. An infinite stream is another rule's affair."""
    return 1e-4 * layer.stream_rms if math.isfinite(layer.stream_rms) else 0.0


def _faint(layer: LayerReport, setting: Setting) -> float:
    """Above 1: the norm's epsilon outweighs the mean square that it should divide out."""
    before_norm = setting.model.norm_place == "pre"
    return _over(math.sqrt(setting.model.norm_eps), layer.stream_rms) if before_norm else 0.0


def _over(a: float, b: float) -> float:
    return a / b if b > 0 else (math.inf if a > 0 else 0.0)


def _size(value: float) -> float:
    return math.inf if math.isnan(value) else value


def _gradients(seen: Snapshot) -> dict[Place, float]:
    return {
        (int(part), None): _size(norm) for part, norm in seen.gradients.items() if part.isdigit()
    }


def _small_gradients(seen: Snapshot, _: Setting) -> Iterator[tuple[Place, float]]:
    """Above 1: a thousandth of what reaches the middle one of the blocks, or nothing at all."""
    norms = _gradients(seen)
    for place, norm in norms.items():
        yield place, _over(max(1e-3 * statistics.median(norms.values()), 1e-7), norm)


# --- What helps ----------------------------------------------------------------------------------


def _scale(setting: Setting) -> str:
    usual = setting.model.head_width**-0.5
    given = setting.model.attn_scale
    return f"model.config.attn_scale (now {_n(given or usual)}; 1/sqrt(head_dim) is {_n(usual)})"


def _qk_norm(setting: Setting) -> str:
    return "" if setting.model.qk_norm else "set model.config.qk_norm to true, "


def _norm_place(setting: Setting) -> str:
    return "set model.config.norm_place to pre, " if setting.model.norm_place == "post" else ""


def _slower(setting: Setting) -> str:
    return (
        f"warm up longer (model.optimizer.warmup_steps, now {setting.optimizer.warmup_steps}) "
        f"or lower model.optimizer.lr (now {_n(setting.optimizer.lr)})"
    )


def _gentler_scores(setting: Setting) -> str:
    return f"{_qk_norm(setting)}lower {_scale(setting)}, {_slower(setting)}"


def _residual(setting: Setting) -> str:
    return f"model.config.residual_scale (now {_n(setting.model.residual_scale)})"


def _init(setting: Setting) -> str:
    return f"model.config.init_std (now {_n(setting.model.init_std)})"


def _n(value: float) -> str:
    return f"{value:.3g}"


RULES: tuple[Rule, ...] = (
    Rule(
        "uniform_heads",
        _by_head(lambda layer, head: layer.entropy_share[head]),
        on=0.995,
        off=0.98,
        finding="all positions weigh alike, so that nothing is picked",
        advice=lambda s: (
            f"{_qk_norm(s)}raise {_scale(s)} or model.optimizer.lr (now {_n(s.optimizer.lr)})"
        ),
    ),
    Rule(
        "collapsed_heads",
        _by_head(_collapse),
        on=0.99,
        off=0.95,
        finding="all weight is on one key, so that no gradient reaches the others",
        advice=_gentler_scores,
    ),
    Rule(
        "large_logits",
        _by_head(lambda layer, head: _size(layer.logit_max[head])),
        on=100.0,
        off=50.0,
        finding="scores go beyond 100, where softmax keeps one key and training tips over",
        advice=_gentler_scores,
        early=True,
    ),
    Rule(
        "dead_heads",
        _by_head(_dead),
        on=1.0,
        off=0.3,
        finding="they add next to nothing to the stream",
        advice=lambda s: (
            f"{_slower(s)}, raise {_init(s)} or {_residual(s)}; "
            f"if they stay dead, fewer will do (model.config.n_head, now {s.model.n_head})"
        ),
    ),
    Rule(
        "dead_units",
        _by_layer(lambda layer, _: layer.dead_units or 0.0),
        on=0.75,
        off=0.5,
        finding="no token wakes three in four of the hidden units of the MLP",
        advice=lambda s: (
            f"{_slower(s)}; model.config.mlp swiglu has no such units (now {s.model.mlp})"
        ),
        patience=3,
    ),
    Rule(
        "idle_blocks",
        _by_layer(_idle),
        on=1.0,
        off=0.3,
        finding="they add less than a ten-thousandth of the stream to it",
        advice=lambda s: f"raise {_residual(s)} or {_init(s)}",
    ),
    Rule(
        "large_activations",
        _by_layer(lambda layer, _: _size(layer.stream_rms)),
        on=1e3,
        off=3e2,
        finding="the root mean square of the stream is beyond 1,000",
        advice=lambda s: f"{_norm_place(s)}lower {_residual(s)} or {_init(s)}, {_slower(s)}",
        early=True,
    ),
    Rule(
        "small_activations",
        _by_layer(_faint),
        on=1.0,
        off=0.5,
        finding="the stream is so faint that norms no longer bring it to size",
        advice=lambda s: (
            f"raise {_init(s)} or {_residual(s)}; model.config.norm_eps is {_n(s.model.norm_eps)}"
        ),
        early=True,
    ),
    Rule(
        "large_gradients",
        lambda seen, _: iter(_gradients(seen).items()),
        on=100.0,
        off=30.0,
        finding="their norm is beyond 100 before clipping",
        advice=lambda s: f"{_norm_place(s)}{_qk_norm(s)}{_slower(s)}, or lower {_residual(s)}",
        early=True,
    ),
    Rule(
        "small_gradients",
        _small_gradients,
        on=1.0,
        off=0.3,
        finding="less than a thousandth of what reaches other blocks, or none",
        advice=lambda s: (
            f"{_norm_place(s)}raise {_residual(s)} or {_init(s)}, or warm up longer "
            f"(model.optimizer.warmup_steps, now {s.optimizer.warmup_steps})"
        ),
        early=True,
        patience=3,
    ),
)


# --- Keeping watch -------------------------------------------------------------------------------


@dataclass
class Symptoms:
    """Judges snapshots one after another.

    Args:
        setting: how the run is set up.
    """

    setting: Setting
    _running: dict[tuple[str, Place], int] = field(default_factory=dict)
    _ill: dict[str, set[Place]] = field(default_factory=dict)
    _told: dict[str, int] = field(default_factory=dict)
    _losses: list[tuple[int, float]] = field(default_factory=list)

    def look(self, seen: Snapshot) -> list[tuple[str, str]]:
        """The kind and the sentence of each warning that is due now."""
        due = []
        for rule in RULES:
            ill = self._judge(rule, seen)
            if ill and self._may_speak(rule.kind, seen.step):
                title = rule.kind.replace("_", " ")
                advice = rule.advice(self.setting)
                text = f"{title} ({_places(ill)}): {rule.finding}. Usually helps: {advice}"
                due.append((rule.kind, text))
        stalled = self._stalled(seen)
        if stalled and self._may_speak("stalled_loss", seen.step):
            due.append(("stalled_loss", stalled))
        return due

    def _judge(self, rule: Rule, seen: Snapshot) -> set[Place]:
        ill = self._ill.setdefault(rule.kind, set())
        if not rule.early and seen.step < self.setting.settled:
            return ill
        for place, value in rule.values(seen, self.setting):
            key = (rule.kind, place)
            self._running[key] = self._running.get(key, 0) + 1 if value >= rule.on else 0
            if self._running[key] >= rule.patience:
                ill.add(place)
            elif not value >= rule.off:
                ill.discard(place)
        return ill

    def _may_speak(self, kind: str, step: int) -> bool:
        if kind in self._told and step - self._told[kind] < QUIET_STEPS:
            return False
        self._told[kind] = step
        return True

    def _stalled(self, seen: Snapshot) -> str | None:
        """No better than token frequencies, and not on the way to be."""
        if not math.isfinite(seen.loss):
            return None
        self._losses.append((seen.step, seen.loss))
        since = seen.step - STALL_STEPS
        earlier = [loss for step, loss in self._losses if step <= since]
        if not earlier or since < self.setting.optimizer.warmup_steps:
            return None
        best = min(earlier)
        if seen.loss < self.setting.unigram - 0.1 or seen.loss < best - PROGRESS:
            return None
        optimizer = self.setting.optimizer
        if seen.loss > best + 0.1:
            helps = _slower(self.setting)
        else:
            helps = (
                f"another model.optimizer.lr (now {_n(optimizer.lr)}; train.py lr-find looks for "
                f"one), {_qk_norm(self.setting)}{_norm_place(self.setting)}or another "
                f"{_residual(self.setting)}"
            )
        return (
            f"stalled loss: not fallen for {STALL_STEPS} steps (now {seen.loss:.3f}, "
            f"{best:.3f} before), and token frequencies alone would give "
            f"{self.setting.unigram:.3f}. Usually helps: {helps}"
        )


def _places(places: set[Place], most: int = 4) -> str:
    """layer 0 heads 1, 2; layer 3 head 0 (and 2 more layers)"""
    heads: dict[int, list[int]] = {}
    for layer, head in places:
        heads.setdefault(layer or 0, []).extend([] if head is None else [head])
    shown = []
    for layer in sorted(heads)[:most]:
        numbers = ", ".join(map(str, sorted(heads[layer])))
        named = f" head{'s' if len(heads[layer]) > 1 else ''} {numbers}" if numbers else ""
        shown.append(f"layer {layer}{named}")
    more = f" (and {len(heads) - most} more layers)" if len(heads) > most else ""
    return "; ".join(shown) + more
