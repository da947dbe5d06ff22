"""Ray Data stages, prefix planning, the store, restoration. `pipeline.restore` gives a stored prefix back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.restoration.restorer import Restoration, Restorer, restore

__all__ = ["Restoration", "Restorer", "restore"]


def __getattr__(name: str) -> Any:
    """Imported at its first use: whoever imports one module of the package need not wait for torch."""
    if name in __all__:
        from pipeline.restoration import restorer

        return getattr(restorer, name)
    raise AttributeError(f"module 'pipeline' has no attribute {name!r}")
