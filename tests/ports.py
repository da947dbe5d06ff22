"""Free ports of the loopback address for the servers of tests."""

from __future__ import annotations

import random
import socket

LOOPBACK = "127.0.0.1"
# Below what Linux gives to outgoing connections (Ray makes hundreds before its servers listen), above what infra/dev-s3 takes.
RANGE = range(30000, 32768)


def free_ports(count: int) -> list[int]:
    """Different TCP ports that were free a moment ago."""
    found: list[int] = []
    for port in random.SystemRandom().sample(RANGE, len(RANGE)):
        if len(found) == count:
            break
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        found.append(port)
    assert len(found) == count, "no ports are free"
    return found
