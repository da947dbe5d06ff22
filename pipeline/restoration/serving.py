"""The service on Ray Serve: replicas of `Service` behind Serve's HTTP proxy, and counts of all of them in one actor."""

from __future__ import annotations

import functools
import importlib
import logging
import math
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from codec.errors import UserError
from pipeline import ray_runtime
from pipeline.model_source import load_tokenizer, resolve_model
from pipeline.options import CACHE_FORMATS, DEFAULT_KEEP, DEVICES, parse_bytes, read_salt
from pipeline.restoration.restorer import LOADED, Restorer
from pipeline.restoration.service import Limits, Service
from pipeline.restoration.targets import find_target, is_known_name
from pipeline.store import Store
from pipeline.worker_process import settle

NAME = "kv-restore"
QUEUED = 64  # requests that the proxy holds when replicas answer nothing; they refuse by themselves when they are full
START_SECONDS = 600.0


@dataclass(frozen=True)
class ServeOptions:
    """Everything `jobs/serve.py` can be told; the names are those of its command line."""

    store: str
    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    tokenizer: str | None = None
    cache_dtype: str | None = None
    salt_env: str | None = None
    token_env: str | None = None
    replicas: int = 1
    device: str = "auto"
    concurrency: int = Limits.concurrency
    waiting: int = Limits.waiting
    keep_decoded: str = DEFAULT_KEEP  # as a person writes it
    max_body: int = Limits.body_bytes
    max_tokens: int = Limits.tokens
    deadline: float = Limits.deadline
    refresh: float = Limits.refresh_seconds
    shared_fs: bool = False

    def check(self) -> None:
        """Raise UserError for the first value that cannot be."""
        if not self.host.strip():
            raise UserError(
                "--host is empty, which would be every address of this machine; write 0.0.0.0 if that is meant"
            )
        for name in ("port", "replicas", "concurrency", "max_body", "max_tokens"):
            top = 65535 if name == "port" else 2**31 - 1
            if not 1 <= getattr(self, name) <= top:
                raise UserError(
                    f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1 and at most {top}"
                )
        if not 0 <= self.waiting < 2**31:
            raise UserError(f"--waiting {self.waiting} must be at least 0")
        parse_bytes(self.keep_decoded, "--keep-decoded", least=0)
        for name in ("deadline", "refresh"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise UserError(f"--{name} {getattr(self, name)} is no positive number of seconds")
        if self.cache_dtype is not None and self.cache_dtype not in CACHE_FORMATS:
            raise UserError(f"--cache-dtype {self.cache_dtype!r} is not known; choose {' or '.join(CACHE_FORMATS)}")
        if self.device not in DEVICES:
            raise UserError(f"--device {self.device!r} is not known; choose {' or '.join(DEVICES)}")
        read_salt(self.salt_env)
        read_token(self.token_env)

    @property
    def limits(self) -> Limits:
        """Those of one replica."""
        keep = parse_bytes(self.keep_decoded, "--keep-decoded", least=0)
        return Limits(self.concurrency, self.waiting, self.max_body, self.max_tokens, self.deadline, self.refresh, keep)


def read_token(name: str | None) -> str:
    """The bearer token in the environment variable of that name; "" where there is no name. UserError where it is no token."""
    if name is None:
        return ""
    value = os.environ.get(name, "")
    if not value:
        raise UserError(f"the environment variable {name} that --token-env names is unset or empty")
    if not value.isascii() or value != value.strip():
        raise UserError(
            f"the token in the environment variable {name} is not plain ASCII without spaces around it, as a header needs"
        )
    return value


class RemoteBoard:
    """A MetricsBoard in another process; reports are sent and not waited for."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def request(self, status: int) -> None:
        """See MetricsBoard."""
        self._actor.request.remote(status)

    def restored(self, asked: int, tokens: int, size: int, seconds: float) -> None:
        """See MetricsBoard."""
        self._actor.restored.remote(asked, tokens, size, seconds)

    def aborted(self, reason: str) -> None:
        """See MetricsBoard."""
        self._actor.aborted.remote(reason)

    async def text(self) -> str:
        """See MetricsBoard."""
        found: str = await self._actor.text.remote()
        return found


class Replica:
    """The body of a Serve deployment. Salt and token are read from its own environment: they never travel."""

    def __init__(self, options: ServeOptions, model: str, device: str, threads: int, board: Any) -> None:
        """model: a fingerprint, or a name that is followed to whatever it stands for."""
        settle(threads)
        store = Store.open(options.store, create=False)
        salt = read_salt(options.salt_env)
        restorer = Restorer(store, model, cache_dtype=options.cache_dtype, salt=salt, device=device)
        for generation in restorer.catalogue.generations[:LOADED]:
            restorer.workshop.decoder(generation)
        remote = RemoteBoard(board)
        self._service = Service(
            restorer,
            options.limits,
            remote,
            read_metrics=remote.text,
            token=read_token(options.token_env),
            tokenizer=functools.partial(_tokenizer, options.tokenizer or options.model),
        )

    async def __call__(self, request: Any) -> Any:
        return await self._service.handle(request)


def _tokenizer(model: str) -> Any:
    try:
        return load_tokenizer(resolve_model(model))
    except UserError as error:
        raise UserError("this service has no tokenizer (see --tokenizer); send token_ids") from error


@contextmanager
def served(options: ServeOptions) -> Iterator[str]:
    """Serve until the `with` block ends; yields the address. What was started here is ended again.

    Raises:
        UserError, DataError, StorageError: what keeps a replica from starting, as one sentence.
    """
    options.check()
    store = Store.open(options.store, create=False)
    target = find_target(store, options.model, options.cache_dtype).hex()
    # What a name stands for can change; files may not be where the replicas run.
    model = options.model if is_known_name(store, options.model, options.cache_dtype) else target
    _check_port(options)
    # A replica cannot say what is wrong with the store, so it is looked at here before.
    Restorer(store, target)
    # A busy machine needs more than the default five seconds to start the proxy; it would be ended and started for ever.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    with ray_runtime.connected(options.replicas, "--replicas") as cluster:
        ray_runtime.check_shared(cluster, store_is_local=store.is_local, shared_fs=options.shared_fs, uri=store.uri)
        device = ray_runtime.choose_device(options.device, cluster)
        cpus = max(1, int(cluster.cpus) - ray_runtime.IO_SLOTS - 1)
        threads = max(1, cpus // options.replicas)
        serve: Any = importlib.import_module("ray.serve")
        try:
            _start(serve, options, model, device, threads)
            yield f"http://{options.host}:{options.port}"
        finally:
            serve.shutdown()


def _start(serve: Any, options: ServeOptions, model: str, device: str, threads: int) -> None:
    ray: Any = importlib.import_module("ray")
    metrics: Any = importlib.import_module("pipeline.restoration.metrics")
    board = ray.remote(metrics.MetricsBoard).options(num_cpus=0).remote()
    deployment = serve.deployment(Replica).options(
        name=NAME,
        num_replicas=options.replicas,
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if device == "cuda" else 0},
        # More than it takes on: the rest are refused by the replica itself, with Retry-After.
        max_ongoing_requests=options.concurrency + options.waiting + 32,
        max_queued_requests=QUEUED,
        graceful_shutdown_timeout_s=5,
    )
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
    serve.start(http_options={"host": options.host, "port": options.port}, proxy_location="HeadOnly")
    app = deployment.bind(options, model, device, threads, board)
    serve.run(
        app,
        name=NAME,
        route_prefix="/",
        blocking=False,
        logging_config={"log_level": "ERROR", "enable_access_log": False},
    )
    _wait(serve)


def _wait(serve: Any) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        status = serve.status().applications[NAME]
        if str(status.status).endswith("RUNNING"):
            return
        if str(status.status).endswith("DEPLOY_FAILED"):
            break
        time.sleep(0.2)
    raise UserError("the replicas did not start; run again with RAY_BACKEND_LOG_LEVEL=info and look at Ray's logs")


def _check_port(options: ServeOptions) -> None:
    try:
        with socket.create_server((options.host, options.port)):
            return
    except OSError as error:
        raise UserError(
            f"cannot listen on {options.host}:{options.port} ({error.strerror}); pass another --port"
        ) from error
