"""Plain data to messages and back. The two directions stand together, so that none forgets a field.

Loads protobuf, but neither gRPC nor torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, get_args

from google.rpc import code_pb2

from gpt.params import ConstraintKind, SamplingParams
from serve.errors import RequestError
from serve.results import Choice, Completion, Delta, Finish, ModelInfo, TokenScore
from serve.v1 import generation_pb2 as pb


class SamplingSettings(TypedDict, total=False):
    """The fields of `gpt.params.SamplingParams`, none of them required.

    One that is not given, or None, has the server's default, which is that of SamplingParams.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    max_tokens: int | None
    stop: Sequence[str]
    seed: int | None
    min_p: float | None
    typical_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logprobs: int | None
    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    allowed_tokens: Sequence[int] | None
    min_tokens: int | None
    stop_tokens: Sequence[int]
    ignore_end_of_text: bool
    prompt_logprobs: int | None
    json_schema: str | None
    regex: str | None
    grammar: str | None


class RequestSettings(SamplingSettings, total=False):
    """What more can be asked of a server: how many texts, whether they begin with the prompt, who
    goes first, and for how long."""

    n: int | None
    echo: bool
    priority: int | None
    time_limit_seconds: float | None


SETTINGS = tuple(field.name for field in dataclasses.fields(SamplingParams))
"""Each is a field of the same name in GenerationSpec."""

REQUEST_SETTINGS = ("n", "echo", "priority", "time_limit_seconds")
"""And so are these."""


def settings_of_params(params: SamplingParams) -> SamplingSettings:
    """All settings as they are, for sending."""
    return {name: getattr(params, name) for name in SETTINGS}  # type: ignore[return-value]


def spec_message(
    prompt: str | Iterable[int], settings: RequestSettings, model: str
) -> pb.GenerationSpec:
    """Raises RequestError for what the wire cannot even carry (a negative count, half a character);
    what it can is for the server to judge.

    Raises:
        TypeError: there is no such setting.
    """
    if unknown := set(settings) - {*SETTINGS, *REQUEST_SETTINGS}:
        raise TypeError(f"no such setting: {', '.join(sorted(unknown))}")
    given = [name for name in get_args(ConstraintKind) if settings.get(name) is not None]
    if len(given) > 1:  # the message would keep the last without a word
        text = f"given beside {given[0]}; a text has one constraint"
        raise RequestError(
            f"spec.{given[1]}: {text}",
            code="INVALID_ARGUMENT",
            violations=[(f"spec.{given[1]}", text)],
        )
    spec = pb.GenerationSpec()
    fill(spec, {**settings, "model": model}, content=prompt, path="spec.")
    return spec


def settings_of(spec: pb.GenerationSpec) -> dict[str, Any]:
    """The settings that a spec gives; those that it does not have their default."""
    given: dict[str, Any] = {}
    for name in SETTINGS:
        value = getattr(spec, name)
        field = spec.DESCRIPTOR.fields_by_name[name]
        if name == "logit_bias":
            if value:
                given[name] = tuple(sorted(value.items()))
        elif name == "allowed_tokens":
            if spec.HasField(name):
                given[name] = tuple(value.ids)
        elif field.is_repeated:
            if value:
                given[name] = tuple(value)
        elif value if not field.has_presence else spec.HasField(name):
            given[name] = value
    return given


def fill(
    message: Any,
    values: Mapping[str, Any],
    *,
    content: str | Iterable[int] | None = None,
    path: str = "",
) -> None:
    """Set a request's fields, leaving out what is None.

    Args:
        content: goes into `text` or `token_ids`, by what it is.
        path: put before the names in violations.

    Raises:
        RequestError: lists all values that the wire cannot carry.
    """
    violations = []
    if isinstance(content, str):
        values = {**values, "text": content}
    elif content is not None:
        values = {**values, "token_ids": content}
    for name, value in values.items():
        if value is None:
            continue
        try:
            if name in ("token_ids", "allowed_tokens"):
                getattr(message, name).SetInParent()  # empty is something else than none
                getattr(message, name).ids.extend(_numbers(value))
            elif name == "logit_bias":
                message.logit_bias.update(dict(value))
            elif message.DESCRIPTOR.fields_by_name[name].is_repeated:
                getattr(message, name).extend(_numbers(value) if name == "ids" else value)
            else:
                setattr(message, name, value)
        except (ValueError, TypeError) as error:
            shown = f"{value!r} " if isinstance(value, int | float) else ""
            violations.append((f"{path}{name}", f"{shown}cannot be sent: {error}"))
    if violations:
        text = "; ".join(f"{name}: {description}" for name, description in violations)
        raise RequestError(text, code="INVALID_ARGUMENT", violations=violations)


def _numbers(value: Any) -> Any:
    if isinstance(value, bytes | bytearray):  # an iterable of numbers, but none that are ids
        raise TypeError("bytes are neither text nor token ids")
    return value


def score_message(score: TokenScore) -> pb.TokenScore:
    return pb.TokenScore(chosen=_logprob_message(score), top=map(_logprob_message, score.top))


def _logprob_message(score: TokenScore) -> pb.TokenLogprob:
    return pb.TokenLogprob(token_id=score.token, token=score.piece, logprob=score.logprob)


def score_of(message: pb.TokenScore) -> TokenScore:
    chosen = message.chosen
    top = tuple(TokenScore(each.token_id, each.token, each.logprob) for each in message.top)
    return TokenScore(chosen.token_id, chosen.token, chosen.logprob, top)


def delta_message(delta: Delta) -> pb.Delta:
    return pb.Delta(
        text=delta.text,
        token_ids=delta.token_ids,
        scores=map(score_message, delta.scores),
        token_bytes=delta.pieces,
        choice=delta.choice,
    )


def delta_of(message: pb.Delta) -> Delta:
    return Delta(
        message.text,
        list(message.token_ids),
        [score_of(score) for score in message.scores],
        list(message.token_bytes),
        message.choice,
    )


def finish_message(finish: Finish) -> pb.Finish:
    return pb.Finish(
        reason=f"FINISH_REASON_{finish.reason.upper()}",
        matched_stop=finish.matched_stop,
        usage=pb.Usage(
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=finish.completion_tokens,
            cached_tokens=finish.cached_tokens,
        ),
        seed=finish.seed,
        timing=pb.Timing(
            queue_seconds=finish.queue_seconds,
            prefill_seconds=finish.prefill_seconds,
            decode_seconds=finish.decode_seconds,
        ),
        choice=finish.choice,
        matched_stop_token=finish.matched_stop_token,
    )


def finish_of(message: pb.Finish) -> Finish:
    return Finish(
        reason=pb.FinishReason.Name(message.reason).removeprefix("FINISH_REASON_").lower(),
        matched_stop=message.matched_stop if message.HasField("matched_stop") else None,
        prompt_tokens=message.usage.prompt_tokens,
        completion_tokens=message.usage.completion_tokens,
        seed=message.seed,
        queue_seconds=message.timing.queue_seconds,
        prefill_seconds=message.timing.prefill_seconds,
        decode_seconds=message.timing.decode_seconds,
        cached_tokens=message.usage.cached_tokens,
        matched_stop_token=(
            message.matched_stop_token if message.HasField("matched_stop_token") else None
        ),
        choice=message.choice,
    )


def completion_of(message: pb.GenerateResponse) -> Completion:
    return Completion(
        [
            Choice(
                choice.text,
                list(choice.token_ids),
                finish_of(choice.finish),
                [score_of(score) for score in choice.scores],
            )
            for choice in message.choices
        ],
        message.prompt.request_id,
        message.prompt.model,
        [score_of(score) for score in message.prompt.scores],
        message.prompt.model_version,
    )


def failure_of(message: pb.Failure) -> RequestError:
    known = message.code in code_pb2.Code.values()
    code = code_pb2.Code.Name(message.code) if known else "UNKNOWN"
    violations = [(each.field, each.description) for each in message.violations]
    return RequestError(message.message, code=code, violations=violations)


def model_fields(info: ModelInfo) -> dict[str, Any]:
    """The fields of `Model`, and of `GetModelResponse`, which has the same."""
    return {
        "name": info.name,
        "block_size": info.block_size,
        "vocab_size": info.vocab_size,
        "parameter_count": info.parameter_count,
        "dtype": info.dtype,
        "architecture": pb.Architecture(**info.architecture),
        "tokenizer": pb.TokenizerInfo(
            kind=info.tokenizer_kind,
            fingerprint=info.tokenizer_fingerprint,
            special_tokens=info.special_tokens,
            end_of_text_id=info.end_of_text_id,
        ),
        "version": info.version,
    }


def model_of(message: pb.Model | pb.GetModelResponse) -> ModelInfo:
    return ModelInfo(
        name=message.name,
        block_size=message.block_size,
        vocab_size=message.vocab_size,
        parameter_count=message.parameter_count,
        dtype=message.dtype,
        architecture={
            field.name: getattr(message.architecture, field.name)
            for field in message.architecture.DESCRIPTOR.fields
        },
        tokenizer_kind=message.tokenizer.kind,
        tokenizer_fingerprint=message.tokenizer.fingerprint,
        special_tokens=dict(message.tokenizer.special_tokens),
        end_of_text_id=message.tokenizer.end_of_text_id,
        version=message.version,
    )
