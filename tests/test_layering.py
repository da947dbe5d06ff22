"""The layers hold: jobs -> pipeline -> codec, never back; codec does no I/O; nothing unpickles; files stay short."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE = 450  # lines; the aim is 400


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


UNSAFE = _words("pickle shelve marshal dill cloudpickle")
# What a layer must not import, by the first part of the name.
FORBIDDEN = {
    "codec": UNSAFE
    | _words(
        "pipeline jobs tests ray fsspec s3fs boto3 botocore aiobotocore aiohttp requests httpx urllib http socket ssl "
        "subprocess multiprocessing asyncio sqlite3 shutil tempfile glob transformers huggingface_hub gguf accelerate "
        "pyarrow pandas rich"
    ),
    "pipeline": UNSAFE | _words("jobs tests"),
    "jobs": UNSAFE | _words("tests"),
}
# Calls that touch a file, by function, by method of whatever object, or by dotted name.
IO_FUNCTIONS = _words("open print input")
IO_METHODS = _words(
    "open read_text read_bytes write_text write_bytes mkdir unlink rmdir touch savez tofile fromfile memmap save_file "
    "load_file safe_open from_file"
)
UNPICKLING = _words("torch.load torch.save np.load np.save numpy.load numpy.save")
IO_CHAINS = UNPICKLING | _words("np.loadtxt np.savetxt numpy.loadtxt numpy.savetxt")


def imported_modules(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of every import in a file of `package`, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - (node.level - 1)] if node.level else ()
            prefix = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from ((node.lineno, f"{prefix}.{alias.name}".strip(".")) for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in {"import_module", "__import__"}:
            name = node.args[0] if node.args else None
            yield node.lineno, name.value if isinstance(name, ast.Constant) and isinstance(name.value, str) else "?"


def dotted(node: ast.AST) -> str:
    """`a.b.c` of a chain of names; a chain that begins with anything else begins with "?"."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def import_findings(source: str, layer: str, package: tuple[str, ...]) -> list[str]:
    forbidden = FORBIDDEN[layer]
    return [
        f"line {line}: imports {name}"
        for line, name in imported_modules(ast.parse(source), package)
        if name.split(".")[0] in forbidden or (name == "?" and layer == "codec")
    ]


def io_findings(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        method = isinstance(node.func, ast.Attribute) and node.func.attr in IO_METHODS
        if name in IO_FUNCTIONS or name in IO_CHAINS or name.startswith("os.") or method:
            found.append(f"line {node.lineno}: calls {name}")
    return found


def files_of(layer: str) -> list[Path]:
    return sorted((ROOT / layer).rglob("*.py"))


def report(findings: dict[Path, list[str]]) -> str:
    return "\n".join(f"{path.relative_to(ROOT)}, {text}" for path, texts in findings.items() for text in texts)


@pytest.mark.parametrize("layer", sorted(FORBIDDEN))
def test_no_import_goes_back(layer: str) -> None:
    findings = {
        path: import_findings(path.read_text(encoding="utf-8"), layer, path.relative_to(ROOT).parent.parts)
        for path in files_of(layer)
    }
    assert not any(findings.values()), report(findings)


def test_codec_does_no_io() -> None:
    own = ROOT / "codec" / "compiled_cache.py"  # it asks when the package's own files were changed
    findings = {path: io_findings(path.read_text(encoding="utf-8")) for path in files_of("codec") if path != own}
    assert not any(findings.values()), report(findings)


def test_nothing_unpickles() -> None:
    for layer in FORBIDDEN:
        for path in files_of(layer):
            calls = [dotted(n.func) for n in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(n, ast.Call)]
            assert not UNPICKLING.intersection(calls), f"{path.relative_to(ROOT)}: {UNPICKLING.intersection(calls)}"


def test_files_stay_short() -> None:
    paths = [path for layer in (*FORBIDDEN, "tests") for path in files_of(layer)]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    long = {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > LONGEST_FILE}
    assert not long, f"split these files (at most {LONGEST_FILE} lines): {long}"


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("codec", "import ray"),
        ("codec", "import ray.data as rd"),
        ("codec", "from pipeline.store import Store"),
        ("codec", "from ..pipeline import store"),
        ("codec", "def f():\n    import fsspec"),
        ("codec", "import importlib\nimportlib.import_module('s3fs')"),
        ("codec", "import importlib\nimportlib.import_module(name)"),
        ("codec", "import pickle"),
        ("pipeline", "from jobs import compress_corpus"),
        ("pipeline", "import jobs.verify"),
        ("pipeline", "import pickle"),
    ],
)
def test_the_import_check_catches(layer: str, source: str) -> None:
    assert import_findings(source, layer, (layer,))


@pytest.mark.parametrize(
    "source",
    ["open('x')", "path.read_bytes()", "Path('x').open()", "torch.load(f)", "os.remove(x)", "np.save(f, a)"],
)
def test_the_io_check_catches(source: str) -> None:
    assert io_findings(source)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("codec", "from . import exact\nfrom .predictor import llama\nimport torch, numpy as np, constriction, xxhash"),
        ("codec", "from safetensors.torch import load, save"),
        ("pipeline", "import codec, ray\nfrom codec.keys import chunk_keys\nimport importlib.util"),
        ("jobs", "from pipeline.store import Store"),
    ],
)
def test_the_checks_let_pass(layer: str, source: str) -> None:
    assert not import_findings(source, layer, (layer,))
    assert layer != "codec" or not io_findings(source + "\nload(data)\nsave(tensors)\nx.load(1)")
