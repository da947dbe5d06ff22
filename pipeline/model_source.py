"""Where a model comes from: a folder, a GGUF file or a hub id; what identifies it; and its parts, read one by one.

Weights are read from safetensors and GGUF only. Pickled weights (`*.bin`, `*.pt`) can run code when they are
loaded, so they are never opened, and code that comes with a model is never run.
"""

import contextlib
import copy
import functools
import hashlib
import json
import logging
import os
import re
import socket
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from codec.errors import UserError
from codec.formats import FORMATS, number_format
from pipeline.fingerprints import file_digest
from pipeline.gguf_file import matrix_types
from pipeline.lora import WEIGHTS as LORA_WEIGHTS
from pipeline.lora import Adapter
from pipeline.secrets import without_secrets

ACCEPTED = "a folder with config.json and *.safetensors, a *.gguf file, or a hub id like org/name"
RUN_DTYPES = {name: fmt.dtype for name, fmt in FORMATS.items() if not fmt.coarse}  # what a model is computed in

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
_VOLATILE = {"_name_or_path", "_model_name_or_path", "transformers_version", "torch_dtype", "dtype"}
_DOMAIN = b"kv-cache target 1\0"
_T = TypeVar("_T")


@dataclass(frozen=True)
class ModelSource:
    """A model that was found. `path` is a folder or a *.gguf file; for the hub, the folder of one commit."""

    kind: Literal["folder", "gguf", "hub"]
    path: str
    name: str
    repo: str = ""
    commit: str = ""
    lora: str = ""  # folder of an adapter that is merged into the weights

    def fingerprint(self, cache_format: str | None = None) -> bytes:
        """32 bytes that name the bits this model computes: contents of weight files, config, cache format and run dtype.

        Files are streamed, and their digests remembered as pipeline/fingerprints.py says.
        Raises UserError when a file cannot be read, and as `resolve_cache_format`.
        """
        cache_format = resolve_cache_format(self, cache_format)
        digest = hashlib.blake2b(_DOMAIN, digest_size=32)
        for file in weight_files(self):
            name = b"" if self.kind == "gguf" else file.name.encode()
            digest.update(struct.pack("<I", len(name)) + name + file_digest(file))
        config = b"" if self.kind == "gguf" else _canonical_config(self)
        run = run_format(self, cache_format)
        formats = cache_format if run == cache_format else f"{cache_format} {run}"
        digest.update(struct.pack("<Q", len(config)) + config + formats.encode())
        if self.lora:  # models without one keep the fingerprints they have
            adapter = Adapter.open(self.lora)
            digest.update(b" lora " + file_digest(adapter.folder / LORA_WEIGHTS) + adapter.canonical())
        return digest.digest()


# ---------------------------------------------------------------- finding it
def resolve_model(spec: str | os.PathLike[str], lora: str | os.PathLike[str] | None = None) -> ModelSource:
    """The model that `spec` names: an existing folder, a *.gguf file or a hub id (`org/name`, `org/name@revision`).

    lora: folder of an adapter; the model with it is another one and is called model+adapter. A hub id is downloaded into the hub's
    cache (or only looked up there with HF_HUB_OFFLINE=1).
    Raises UserError in one sentence when there is no such model or it is not readable.
    """
    if lora is not None:
        adapter = Adapter.open(str(Path(lora).expanduser().resolve()))
        source = resolve_model(spec)
        return replace(source, name=f"{source.name}+{adapter.folder.name}", lora=str(adapter.folder))
    text = os.fspath(spec)
    path = Path(text).expanduser()
    if not text:
        raise UserError(f"the model '' names nothing; accepted are {ACCEPTED}")
    if path.is_dir():
        return _resolve_folder(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UserError(f"the model {text!r} is a file that is not *.gguf; accepted are {ACCEPTED}")
        matrix_types(path)
        return ModelSource("gguf", str(path.resolve()), path.stem)
    if _HUB_ID.fullmatch(text) and not text.lower().endswith(".gguf"):
        repo, _, revision = text.partition("@")
        return _from_hub(repo, revision or None)
    raise UserError(f"the model {text!r} does not exist; accepted are {ACCEPTED}")


def _resolve_folder(path: Path) -> ModelSource:
    source = ModelSource("folder", str(path.resolve()), path.resolve().name)
    if (path / "adapter_config.json").exists():
        raise UserError(
            f"the model folder {str(path)!r} holds a LoRA adapter; pass its model, and this folder with --lora"
        )
    if not (path / "config.json").is_file():
        found = sorted(path.glob("*.gguf"))
        hint = f"; pass the file {str(found[0])!r} instead" if found else ""
        raise UserError(f"the model folder {str(path)!r} has no config.json{hint}; accepted are {ACCEPTED}")
    weight_files(source)
    return source


def _from_hub(repo: str, revision: str | None) -> ModelSource:
    from huggingface_hub import snapshot_download

    try:
        with quiet():
            path = snapshot_download(
                repo, revision=revision, allow_patterns=_HUB_FILES, ignore_patterns=["*/*", "consolidated*"]
            )
    except Exception as error:  # the hub client raises from many libraries; none of them may reach the user as a trace
        raise UserError(
            f"the model {repo!r} is no folder or file here and the hub does not give it "
            f"({_first_line(error)}); accepted are {ACCEPTED}"
        ) from error
    folder = _resolve_folder(Path(path))
    return ModelSource("hub", folder.path, repo.partition("/")[2], repo, Path(path).name)


def localise(source: ModelSource) -> ModelSource:
    """The same model on this node: a hub model that is not here yet is downloaded at the same commit.

    Raises UserError when a folder or file that was found elsewhere does not exist on this node.
    """
    missing = next((path for path in (source.lora, source.path) if path and not Path(path).exists()), None)
    if missing is None:
        return source
    if source.kind == "hub" and missing == source.path:
        found = _from_hub(source.repo, source.commit)
        return replace(found, name=source.name, lora=source.lora)
    raise UserError(
        f"the model {missing!r} does not exist on node {socket.gethostname()!r}; "
        "put it on storage that every node mounts, or pass a hub id"
    )


def weight_files(source: ModelSource) -> list[Path]:
    """The files that hold the weights, sorted by name: those that transformers loads. UserError if there are none."""
    path = Path(source.path)
    if source.kind == "gguf":
        return [path]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        pickled = any(any(path.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
        hint = "only pickled weights, which are never loaded; convert them to safetensors" if pickled else "no weights"
        raise UserError(f"the model folder {str(path)!r} has {hint} (expected model.safetensors or its index)")
    names = sorted(set(_shard_map(index).values()))
    for name in names:
        if not (path / name).is_file():
            raise UserError(f"the model folder {str(path)!r} lacks the weight file {name!r} that its index names")
    return [path / name for name in names]


def _shard_map(index: Path) -> dict[str, str]:
    """Tensor name to file name. The index is data: names that leave the folder are refused."""
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"the weight index {str(index)!r} has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(f"the weight index {str(index)!r} names {name!r}, no safetensors file of its folder")
    return weight_map


# ---------------------------------------------------------------- fingerprint
def _canonical_config(source: ModelSource) -> bytes:
    """config.json without what changes no bit of K and V: where it came from, who wrote it, the file's dtype."""
    config = {k: v for k, v in _read_json(Path(source.path) / "config.json").items() if k not in _VOLATILE}
    return json.dumps(config, sort_keys=True, separators=(",", ":")).encode()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"the file {str(path)!r} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"the file {str(path)!r} is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"the file {str(path)!r} is not a JSON object")
    return value


# ---------------------------------------------------------------- its parts
def load_config(source: ModelSource) -> dict[str, Any]:
    """The HF config of the text decoder as `config_dict` gives it. Raises UserError."""
    return config_dict(hf_config(source))


def config_dict(config: Any) -> dict[str, Any]:
    """`to_dict()` of a transformers config, and its values under transformers' standard names: `num_hidden_layers` for `n_layer`."""
    own: dict[str, Any] = config.to_dict()
    return {name: getattr(config, name, None) for name in config.attribute_map} | own


def hf_config(source: ModelSource) -> Any:
    """The transformers config object of the text decoder. Raises UserError (unknown family, unreadable file)."""
    config = copy.deepcopy(_read_config(source, _stamp(source)))
    return config.get_text_config(decoder=True)


@functools.lru_cache(maxsize=4)
def _read_config(source: ModelSource, stamp: int) -> Any:
    """Remembered, because reading it from a GGUF file takes seconds; `stamp` changes with the file."""
    from transformers import AutoConfig

    args, keywords = location(source)
    return hf_call(source, lambda: AutoConfig.from_pretrained(*args, **keywords))


def _stamp(source: ModelSource) -> int:
    path = Path(source.path) if source.kind == "gguf" else Path(source.path) / "config.json"
    try:
        return path.stat().st_mtime_ns
    except OSError as error:
        raise UserError(f"the file {str(path)!r} cannot be read ({error.strerror})") from error


def load_tokenizer(source: ModelSource) -> Any:
    """The transformers tokenizer that comes with the model. Raises UserError."""
    from transformers import AutoTokenizer

    args, keywords = location(source)
    return hf_call(source, lambda: AutoTokenizer.from_pretrained(*args, **keywords))


def location(source: ModelSource) -> tuple[tuple[str], dict[str, Any]]:
    """Arguments that make from_pretrained read this source, and nothing from a network or from its code."""
    keywords: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    if source.kind == "gguf":
        path = Path(source.path)
        return (str(path.parent),), {**keywords, "gguf_file": path.name}
    return (source.path,), keywords


def resolve_cache_format(source: ModelSource, cache_format: str | None = None) -> str:
    """The format asked for (a name of codec.formats), or for None and "auto" the model's own dtype.

    A GGUF of quantised blocks has no dtype of its own: it is dequantised to bf16. Raises UserError for other dtypes.
    """
    if cache_format in FORMATS:
        return cache_format
    if cache_format not in (None, "auto"):
        raise UserError(f"the cache dtype {cache_format!r} is unknown; pass {_either(FORMATS)}")
    own = _gguf_dtype(Path(source.path)) if source.kind == "gguf" else _config_dtype(source)
    for name, dtype in RUN_DTYPES.items():
        if own == str(dtype).removeprefix("torch."):
            return name
    raise UserError(
        f"the model {source.name!r} has dtype {own}, which is not stored; pass --cache-dtype {_either(RUN_DTYPES)}"
    )


def run_format(source: ModelSource, cache_format: str) -> str:
    """The format whose dtype the model is computed in: that of its cache, or its own where the cache is FP8. UserError."""
    return resolve_cache_format(source) if number_format(cache_format).coarse else cache_format


def _either(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"


def _config_dtype(source: ModelSource) -> str:
    config = _read_json(Path(source.path) / "config.json")
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and (own := part.get("dtype", part.get("torch_dtype"))):
            return str(own).removeprefix("torch.")
    return "unknown"


def _gguf_dtype(path: Path) -> str:
    """The dtype of a GGUF file's matrices when they are stored plain; bfloat16 when they are quantised."""
    kinds = matrix_types(path)
    plain = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
    return plain.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"


# ---------------------------------------------------------------- calling transformers
def hf_call(source: ModelSource, call: Callable[[], _T]) -> _T:
    """Run a call into transformers without its noise; whatever it raises on this input becomes one UserError."""
    try:
        with quiet():
            return call()
    except (UserError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:  # transformers, gguf and safetensors each have their own zoo of exceptions
        what = "GGUF file" if source.kind == "gguf" else "model"
        raise UserError(f"the {what} {source.path!r} cannot be loaded ({_reason(source, error)})") from error


def _reason(source: ModelSource, error: Exception) -> str:
    text = _first_line(error)
    if "trust_remote_code" in text or "custom code" in text:
        return "it needs code of its own, which is never run"
    if source.kind == "gguf" and isinstance(error, (IndexError, OverflowError, struct.error)):
        return "it is truncated or corrupt"
    return text


def _first_line(error: BaseException) -> str:
    """The first line of an error's message, short and without its full stop, so that it fits into a sentence."""
    lines = str(error).strip().splitlines()
    text = without_secrets(lines[0]).removeprefix("Got: ").rstrip(". :") if lines else ""
    return (text[:200] + "…" if len(text) > 200 else text) or type(error).__name__


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, warnings or log lines of transformers, gguf and the hub; restored afterwards."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loader
    from transformers.utils import logging as hf_logging

    verbosity, bars, bar = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled(), gguf_loader.tqdm
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hf_logging.set_verbosity(logging.CRITICAL)
    hf_logging.disable_progress_bar()
    hub.setLevel(logging.CRITICAL)
    gguf_loader.tqdm = lambda items, **_: items
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        hub.setLevel(hub_level)
        gguf_loader.tqdm = bar
        if bars:
            hf_logging.enable_progress_bar()
