"""What is peculiar to S3: how a connection is made, and what its errors mean."""

from __future__ import annotations

import errno
import os
from typing import Any

import fsspec

from codec.errors import UserError

TRANSIENT_CLASSES = {f"botocore.{name}Error" for name in ("HTTPClient", "Connection", "ResponseParser")} | {
    "aiohttp.ClientError"
}
ENCRYPTION, ENCRYPTION_KEY = "KV_STORE_SSE", "KV_STORE_SSE_KMS_KEY_ID"
ENCRYPTIONS = ("AES256", "aws:kms", "aws:kms:dsse")

# What servers answer when there is no room: Ceph and SeaweedFS; MinIO's disks and quotas; others.
FULL_CODES = {
    "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientStorage", "StorageFull",
    "InsufficientCapacity",
}  # fmt: skip


def connect_s3(options: dict[str, Any]) -> Any:
    """The fsspec file system for S3, with what the environment says and these storage options."""
    options = {"use_listings_cache": False, **options}
    options["config_kwargs"] = {
        "retries": {"total_max_attempts": 1},  # we repeat requests ourselves, since we must know that one was repeated
        "connect_timeout": 10,
        "read_timeout": 60,
        **options.get("config_kwargs", {}),
    }
    if encryption := _encryption():
        options["s3_additional_kwargs"] = {**encryption, **options.get("s3_additional_kwargs", {})}
    options["client_kwargs"] = dict(options.get("client_kwargs", {}))
    if os.environ.get("AWS_REGION"):
        options["client_kwargs"].setdefault("region_name", os.environ["AWS_REGION"])
    connected = fsspec.filesystem("s3", skip_instance_cache=True, **options)
    connected.retries = 1
    return connected


def _encryption() -> dict[str, str]:
    """What the environment asks of the server for every object that is written: the kind of encryption, and its key."""
    kind, key = os.environ.get(ENCRYPTION, ""), os.environ.get(ENCRYPTION_KEY, "")
    if kind not in ("", *ENCRYPTIONS):
        raise UserError(f"{ENCRYPTION} is {kind!r:.50}; it may be {' or '.join(ENCRYPTIONS)}")
    if key and not kind.startswith("aws:kms"):
        raise UserError(f"{ENCRYPTION_KEY} is set, and needs {ENCRYPTION} to be aws:kms")
    chosen = {"ServerSideEncryption": kind, "SSEKMSKeyId": key}
    return {name: value for name, value in chosen.items() if value}


def answer(error: BaseException) -> tuple[int, str]:
    """(HTTP status, error code) of an S3 error; (0, "") where the server did not answer."""
    for candidate in (error, error.__cause__):
        response = getattr(candidate, "response", None)
        if isinstance(response, dict):
            http = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            return http, str(response.get("Error", {}).get("Code", ""))
    return 0, ""


def is_full(error: BaseException) -> bool:
    """Whether the storage, or what this account may use of it, is full; waiting does not help."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    status, code = answer(error)
    return status == 507 or code in FULL_CODES


def lost_race(error: BaseException | None) -> bool:
    """Whether a conditional write was refused because the object exists (s3fs has a class for Amazon's answer only)."""
    while error is not None:
        if isinstance(error, FileExistsError) or answer(error)[0] == 412:
            return True
        error = error.__context__  # aborting a multipart upload may have failed on top of it
    return False


def transient(error: BaseException) -> bool:
    """Whether the same request may succeed a moment later."""
    status, code = answer(error)
    if is_full(error):
        return False
    if status:
        return status in (408, 409, 429) or status >= 500 or code in ("RequestTimeout", "IncompleteBody")
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    # By name, so that a local store needs neither botocore nor aiohttp.
    bases = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(error).__mro__}
    return not bases.isdisjoint(TRANSIENT_CLASSES)
