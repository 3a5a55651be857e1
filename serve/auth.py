"""API keys: who may call, known to the log by a label.

A key comes in the metadata, `authorization: Bearer KEY`. Only digests of keys are kept, and all of
them are compared in constant time, so the time of an answer tells nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc

from gpt.errors import ConfigError
from serve.limits import Limits, OverLimitError, Quota
from serve.observing import CALL
from serve.status import abort, retry_after
from serve.within import refusing, within

log = logging.getLogger(__name__)

OPEN_TO_ALL = ("/grpc.health.v1.Health/",)
"""Probes have no key."""

LEAST_KEY = 16
"""Characters. Shorter ones can be guessed."""

TELL_SECONDS = 60.0
"""How often the log tells of calls that were refused: anybody can make more."""

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
OPTIONS = {"concurrent": 100_000, "per-minute": 1_000_000}


@dataclass(frozen=True)
class Caller:
    """Whose key it is.

    Attributes:
        label: what the log calls it.
        places: how many requests of a batch may run at once.
    """

    label: str
    places: int


CALLER: ContextVar[Caller | None] = ContextVar("caller", default=None)
"""Who makes the call that this code answers; None if the server asks for no key."""


@dataclass(frozen=True)
class Key:
    """One key, without the key itself."""

    label: str
    digest: bytes
    limits: Limits


def read_keys(text: str, where: str, limits: Limits) -> list[Key]:
    """Keys, one `LABEL KEY [concurrent=N] [per-minute=N]` a line; `#` begins a comment.

    Instead of a key there may be `sha256:` with the digest of one, in hexadecimal digits.

    Args:
        limits: of keys that have none of their own.

    Raises:
        ConfigError: names the line, and never a key.
    """
    keys: dict[str, Key] = {}
    for number, line in enumerate(text.splitlines(), 1):
        label, *rest = line.partition("#")[0].split() or [""]
        if not label:
            continue
        place = f"{where}, line {number}"
        if not LABEL.fullmatch(label) or not rest:
            raise ConfigError(f"{place}: not LABEL KEY; a label has letters, digits and _ . @ -")
        if label in keys:
            raise ConfigError(f"{place}: the label {label} is there twice")
        key = Key(label, _digest_of(rest[0], place), _own_limits(rest[1:], limits, place))
        if any(key.digest == other.digest for other in keys.values()):
            raise ConfigError(f"{place}: the key of {label} has another label as well")
        keys[label] = key
    return list(keys.values())


def _digest_of(written: str, place: str) -> bytes:
    scheme, colon, digits = written.partition(":")
    if colon and scheme == "sha256":
        with contextlib.suppress(ValueError):
            if len(found := bytes.fromhex(digits)) == hashlib.sha256().digest_size:
                return found
        raise ConfigError(f"{place}: after sha256: there must be 64 hexadecimal digits")
    if len(written) < LEAST_KEY:
        raise ConfigError(
            f"{place}: a key must have at least {LEAST_KEY} characters; make one with "
            "`openssl rand -hex 24`"
        )
    return digest(written)


def _own_limits(options: list[str], limits: Limits, place: str) -> Limits:
    for option in options:
        name, _, value = option.partition("=")
        most = OPTIONS.get(name)
        if most is None or not value.isascii() or not value.isdigit():
            raise ConfigError(f"{place}: after the key there may be concurrent=N and per-minute=N")
        if not 1 <= int(value) <= most:
            raise ConfigError(f"{place}: {name} must be 1 to {most}")
        limits = replace(limits, **{name.replace("-", "_"): int(value)})
    return limits


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """The keys in force, from a file that may change and from the environment.

    Args:
        file: see `read_keys`.
        more: the same with commas in place of line ends.
        limits: of keys that have none of their own.

    Raises:
        ConfigError: a file that cannot be read, or holds no key.
    """

    def __init__(self, file: Path | None, more: str, limits: Limits) -> None:
        self.paths = [] if file is None else [file]
        self._more = more.replace(",", "\n")
        self._limits = limits
        self._keys = self._read()
        self._quotas: dict[str, Quota] = {}

    @property
    def labels(self) -> list[str]:
        return [key.label for key in self._keys]

    def reload(self) -> bool:
        """Read the file again; whether it holds anything new. Raises ConfigError."""
        found = self._read()
        if found == self._keys:
            return False
        self._keys = found
        return True

    def _read(self) -> list[Key]:
        # The environment's under the name that it has; one could not tell otherwise which is bad.
        keys = read_keys(self._more, "the API keys of the environment", self._limits)
        for path in self.paths:
            try:
                text = path.read_text(encoding="utf-8")
            except OSError as error:
                raise ConfigError(f"cannot read the API keys {path}: {error.strerror}") from None
            except UnicodeDecodeError:
                raise ConfigError(f"the API keys {path} are no UTF-8 text") from None
            keys += read_keys(text, str(path), self._limits)
        if not keys:
            raise ConfigError(
                f"there is no API key in {self.paths[0] if self.paths else 'the environment'}; "
                "give one LABEL KEY a line, or no file"
            )
        labels = [key.label for key in keys]
        if twice := next((label for label in labels if labels.count(label) > 1), None):
            raise ConfigError(f"the label {twice} is in the file and in the environment")
        return keys

    def find(self, presented: str) -> Key | None:
        """The key that was presented. All are compared, whichever it is."""
        wanted, found = digest(presented), None
        for key in self._keys:
            if hmac.compare_digest(key.digest, wanted):
                found = key
        return found

    def quota(self, label: str) -> Quota:
        """What is used under that label; a key that is replaced goes on where it was."""
        return self._quotas.setdefault(label, Quota())


class Authenticate(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Lets in who has a key and keeps within its limits. Others get UNAUTHENTICATED, or
    RESOURCE_EXHAUSTED with a hint when to come again."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys
        self._refused = 0
        self._told_at = -TELL_SECONDS

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        method: str = handler_call_details.method
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(OPEN_TO_ALL):
            return handler
        key = self._keys.find(_presented(dict(handler_call_details.invocation_metadata)))
        if key is None:
            return refusing(handler, self._refuse)

        def admit(
            request: Any, context: grpc.aio.ServicerContext
        ) -> AbstractAsyncContextManager[None]:
            return self._admitted(key, method, request, context)

        return within(handler, admit)

    async def _refuse(self, context: grpc.aio.ServicerContext) -> None:
        self._refused += 1
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            log.warning(
                "%d calls without a valid key refused, the last from %s",
                self._refused,
                context.peer(),
            )
            self._refused, self._told_at = 0, time.monotonic()
        await context.abort(
            grpc.StatusCode.UNAUTHENTICATED,
            "this server wants a valid API key, in the metadata: authorization: Bearer KEY",
        )

    @contextlib.asynccontextmanager
    async def _admitted(
        self, key: Key, method: str, request: Any, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[None]:
        wanted = max(1, len(getattr(request, "specs", ())))
        with contextlib.ExitStack() as held:
            try:
                places = self._keys.quota(key.label).places(key.limits, wanted)
                granted = held.enter_context(places)
            except OverLimitError as error:
                log.info("%s: %s refused: over its limit", key.label, method)
                await abort(
                    context,
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    str(error),
                    retry_after(error.retry_after),
                )
            log.info("%s: %s", key.label, method)
            CALLER.set(Caller(key.label, granted))
            if (call := CALL.get()) is not None:
                call.label = key.label
            yield


def _presented(metadata: Mapping[str, str | bytes]) -> str:
    """The key in the metadata, or nothing."""
    value = metadata.get("authorization", "")
    scheme, _, key = str(value).partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""
