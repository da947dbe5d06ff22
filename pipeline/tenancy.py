"""Tenants: whose chunk a chunk is.

A tenant has a salt, a secret that goes into the keys of all its chunks (DESIGN 8), so two tenants share none of them, not
even those of one prompt. The salt comes from an environment variable or from a record's field `salt`; it is never stored
and never shown. What is stored of it is a digest, the tenant's name, and the key of the empty prefix, which verification
needs to find the tokens of a chunk. A salt that can be guessed can be found from either: it should be long and random.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from codec.keys import root_key


def tenant_name(salt: bytes) -> str:
    """What the tenant with this salt is called in the store: 64 hex characters; "" without a salt."""
    return hashlib.blake2b(salt, digest_size=32).hexdigest() if salt else ""


@dataclass(frozen=True)
class Roots:
    """All that the key of an empty prefix depends on but the salt, and that key for records without one of their own."""

    target: bytes
    cache_format: str
    chunk_tokens: int
    rope_regime: str
    scales: bytes  # of an FP8 cache, as far as they are known
    root: bytes
    tenant: str  # the name of the job's own tenant, to whom `root` belongs

    @staticmethod
    def make(
        *, target: bytes, cache_format: str, chunk_tokens: int, rope_regime: str, scales: bytes, salt: bytes
    ) -> Roots:
        """`salt` is the job's own; it is not kept."""
        made = Roots(target, cache_format, chunk_tokens, rope_regime, scales, b"", tenant_name(salt))
        return Roots(target, cache_format, chunk_tokens, rope_regime, scales, made._root(salt), made.tenant)

    def of(self, salt: str | None) -> tuple[str, bytes]:
        """(tenant, key of the empty prefix) of a record with this salt; None: it has none of its own."""
        if salt is None:
            return self.tenant, self.root
        return tenant_name(salt.encode()), self._root(salt.encode())

    def of_tenants(self, salts: Iterable[bytes]) -> dict[str, bytes]:
        """Tenant -> key of the empty prefix: of these salts' tenants, and of prompts without a salt."""
        return {tenant_name(salt): self._root(salt) for salt in (b"", *salts)}

    def _root(self, salt: bytes) -> bytes:
        return root_key(
            target=self.target,
            cache_format=self.cache_format,
            chunk_tokens=self.chunk_tokens,
            rope_regime=self.rope_regime,
            scales=self.scales,
            salt=salt,
        )
