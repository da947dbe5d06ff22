"""A service over HTTP while its store is recompressed: who asks by name, who asks by fingerprint, and what text means to each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline import recompress as module
from pipeline.model_source import load_tokenizer, resolve_model
from tests.conftest import write_tokenizer
from tests.made_store import RECORDS, make, without_ray
from tests.ports import free_ports
from tests.stored import same
from tests.test_recompress import TEXT, A, Site
from tests.test_service import Server, pairs_of, until

ASKED = {"token_ids": A}
WORDS = {"text": TEXT["text"]}


def ids_of(site: Site) -> list[int]:
    """The text, as the model's files read it now."""
    found: list[int] = load_tokenizer(resolve_model(site.model)).encode(TEXT["text"], add_special_tokens=False)
    return found


def profiles(server: Server) -> set[bytes]:
    """Those of the generations that it reads."""
    return {generation.profile for generation in server.restorer.catalogue.generations}


def gives(server: Server, body: dict[str, Any], target: bytes, truth: Any) -> bool:
    """Whether the answer is this target's cache of the whole prompt, to the bit."""
    tensors, headers = server.tensors(body)
    mine = headers["x-kv-target"] == target.hex() and headers["x-kv-tokens"] == str(truth[0][0].shape[1])
    return mine and same(pairs_of(tensors, range(len(truth))), truth)


def test_a_service_goes_on_with_the_old_caches_until_the_new_ones_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_ray(monkeypatch)
    site = Site(tmp_path, [*RECORDS, TEXT])
    assert site.compress() == 0
    made, old, point = make(site.options), site.fingerprint(), module.point
    first, text = site.truth(A), site.truth(ids_of(site))
    ports = free_ports(2)
    reads = {"tokenizer": lambda: load_tokenizer(resolve_model(site.model))}
    with Server(made, ports[0], "mymodel", **reads) as named, Server(made, ports[1], old.hex(), **reads) as fixed:
        for server in (named, fixed):
            assert gives(server, ASKED, old, first) and gives(server, WORDS, old, text)
        site.weights(5)
        write_tokenizer(site.model, vocab_size=300)
        new, second, told = site.fingerprint(), site.truth(A), site.truth(ids_of(site))
        assert told[0][0].shape != text[0][0].shape, "the text has other tokens now"
        seen: list[bool] = []

        def pointing(*given: Any, **more: Any) -> None:
            """All is stored and verified, and readers do not know of it."""
            seen.extend(gives(server, ASKED, old, first) for server in (named, fixed))
            point(*given, **more)

        with monkeypatch.context() as patch:
            patch.setattr(module, "point", pointing)
            assert site.recompress(token_ids="keep") == 0
        assert seen == [True] * 2
        assert until(lambda: gives(named, ASKED, new, second))
        assert gives(named, WORDS, new, told), "the text is read as the new model reads it"
        assert gives(fixed, ASKED, old, first) and gives(fixed, WORDS, old, text)
        # Another rung of the same target: other blobs, the same bits.
        before = profiles(named)
        assert site.recompress(codec_only=True, coder="constriction-ans24/0.5") == 0
        assert until(lambda: gives(named, ASKED, new, second) and len(profiles(named) - before) == 1)
        assert len(profiles(named)) == 1 and gives(named, WORDS, new, told) and gives(fixed, ASKED, old, first)
