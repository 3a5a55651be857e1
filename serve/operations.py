"""What can be asked of a server: for each RPC its request, and what its answer means.

Both clients send these; they differ in how they wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from serve import wire
from serve.errors import RequestError
from serve.results import (
    Completion,
    Delta,
    Detokenization,
    Finish,
    ModelInfo,
    Scores,
    Tokenization,
    TokenScore,
)
from serve.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from serve.wire import RequestSettings

T = TypeVar("T")


@dataclass(frozen=True)
class Operation(Generic[T]):
    """An RPC with one answer.

    Attributes:
        method: its name.
        read: the answer as plain data.
    """

    method: str
    request: Any
    read: Callable[[Any], T]


def generate(
    prompt: str | Sequence[int], settings: RequestSettings, model: str
) -> Operation[Completion]:
    spec = wire.spec_message(prompt, settings, model)
    return Operation("Generate", pb.GenerateRequest(spec=spec), wire.completion_of)


def stream_request(
    prompt: str | Sequence[int], settings: RequestSettings, model: str
) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(spec=wire.spec_message(prompt, settings, model))


def batch_request(requests: Iterable[Mapping[str, Any]], model: str) -> pb.BatchGenerateRequest:
    """Raises TypeError: a request without a prompt, or a setting that there is not."""
    specs = []
    for index, settings in enumerate(requests):
        if "prompt" not in settings:
            raise TypeError(f"request {index} has no prompt")
        rest: Any = {name: value for name, value in settings.items() if name != "prompt"}
        specs.append(wire.spec_message(settings["prompt"], rest, model))
    return pb.BatchGenerateRequest(specs=specs)


def batch_result(response: pb.BatchGenerateResponse) -> tuple[int, Completion | RequestError]:
    if response.WhichOneof("outcome") == "completion":
        return response.index, wire.completion_of(response.completion)
    return response.index, wire.failure_of(response.failure)


def score(content: str | Sequence[int], top: int, model: str) -> Operation[Scores]:
    request = pb.ScoreRequest()
    wire.fill(request, {"top": top, "model": model}, content=content)
    return Operation("Score", request, _scores_of)


def _scores_of(answer: pb.ScoreResponse) -> Scores:
    return Scores(
        scores=[wire.score_of(score) for score in answer.scores],
        total_nats=answer.total_nats,
        bits_per_byte=answer.bits_per_byte if answer.HasField("bits_per_byte") else None,
        byte_count=answer.byte_count,
        request_id=answer.request_id,
        model=answer.model,
        model_version=answer.model_version,
        queue_seconds=answer.timing.queue_seconds,
        prefill_seconds=answer.timing.prefill_seconds,
    )


def tokenize(text: str, special: bool, ids_only: bool, model: str) -> Operation[Tokenization]:
    request = pb.TokenizeRequest()
    wire.fill(request, {"text": text, "special": special, "ids_only": ids_only, "model": model})

    def read(answer: pb.TokenizeResponse) -> Tokenization:
        return Tokenization(
            list(answer.ids), list(answer.pieces), list(answer.starts), answer.model
        )

    return Operation("Tokenize", request, read)


def detokenize(ids: Iterable[int], model: str) -> Operation[Detokenization]:
    request = pb.DetokenizeRequest()
    wire.fill(request, {"ids": ids, "model": model})

    def read(answer: pb.DetokenizeResponse) -> Detokenization:
        return Detokenization(answer.text, answer.data, answer.model)

    return Operation("Detokenize", request, read)


def list_models() -> Operation[list[ModelInfo]]:
    def read(answer: pb.ListModelsResponse) -> list[ModelInfo]:
        return [wire.model_of(model) for model in answer.models]

    return Operation("ListModels", pb.ListModelsRequest(), read)


def get_model(name: str) -> Operation[ModelInfo]:
    request = pb.GetModelRequest()
    wire.fill(request, {"model": name})
    return Operation("GetModel", request, wire.model_of)


class StreamState:
    """What is known of a text that is being made.

    Attributes:
        request_id, model, model_version, prompt_tokens, seed: known once the first delta, or the
            end, has come.
        finishes: how the texts ended, by their choice.
        prompt_scores: how likely the tokens of the prompt were, if that was asked for.
        begun: whether a delta has been handed out; the request is then never sent again.
    """

    def __init__(self) -> None:
        self.request_id = ""
        self.model = ""
        self.model_version = ""
        self.prompt_tokens = 0
        self.seed = 0
        self.finishes: dict[int, Finish] = {}
        self.prompt_scores: list[TokenScore] = []
        self.begun = False

    @property
    def finish(self) -> Finish | None:
        """How the first text ended; None until then."""
        return self.finishes.get(0)

    def take(self, response: pb.GenerateStreamResponse) -> Delta | None:
        """Note what an event tells; its delta, if it is one."""
        kind = response.WhichOneof("event")
        if kind == "prompt":
            self.request_id = response.prompt.request_id
            self.model = response.prompt.model
            self.model_version = response.prompt.model_version
            self.prompt_tokens = response.prompt.prompt_tokens
            self.seed = response.prompt.seed
            self.prompt_scores = [wire.score_of(score) for score in response.prompt.scores]
        elif kind == "delta":
            self.begun = True
            return wire.delta_of(response.delta)
        elif kind == "finish":
            self.finishes[response.finish.choice] = wire.finish_of(response.finish)
        return None
