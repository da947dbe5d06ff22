"""Taking credentials out of text that other libraries wrote, before it goes into a message or a log."""

from __future__ import annotations

import os
import re

# Environment variables whose values must not be shown.
_VARIABLES = (
    "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN",
)  # fmt: skip


def without_secrets(text: str) -> str:
    """The text on one line, with the values of credential variables and the user part of URLs left out."""
    text = " ".join(text.split())
    for name in _VARIABLES:
        if value := os.environ.get(name):
            text = text.replace(value, "***")
    return re.sub(r"//[^/@\s]+@", "//", text)
