"""Where the options of a job come from: its command line, KV_JOB_* environment variables, a YAML file, and defaults, in that order.

    python jobs/compress_corpus.py --config nightly.yaml --limit 100

    # nightly.yaml: the names of the flags, with - or _
    model: /models/ours
    corpus: s3://bucket/prompts/
    store: s3://bucket/prefixes
    skip-bad: true

A key that is no flag is refused. What a job goes by is shown at its start, each value with where it came from.
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from codec.errors import UserError
from pipeline.secrets import without_secrets

MAX_BYTES = 1 << 20
PREFIX = "KV_JOB_"
HIDDEN = ("config", "debug", "help")  # of the command line itself


@dataclass(frozen=True)
class Given:
    """The options of a job by their names, and where each came from."""

    values: dict[str, Any]
    origins: dict[str, str]
    flags: dict[str, str]  # name of a value -> the flag's, without its dashes

    @property
    def namespace(self) -> argparse.Namespace:
        """The values as argparse gives them."""
        return argparse.Namespace(**self.values)

    def without(self, *names: str) -> dict[str, Any]:
        """The values, except some."""
        return {name: value for name, value in self.values.items() if name not in names}

    def plain(self) -> dict[str, dict[str, Any]]:
        """Flag -> value and origin of every option. Secrets are not among them: they are in variables that options name."""
        return {
            self.flags[name]: {
                "value": without_secrets(value) if isinstance(value, str) else value,
                "from": self.origins[name],
            }
            for name, value in self.values.items()
        }

    def show(self, console: Console) -> None:
        """One line an option."""
        width = max(map(len, self.flags.values()))
        for flag, found in self.plain().items():
            shown = "-" if found["value"] in (None, []) else found["value"]
            console.print(
                f"  {flag.ljust(width)}  {shown}  ({found['from']})", markup=False, highlight=False, soft_wrap=True
            )


def read_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, environment: Mapping[str, str] = os.environ
) -> Given:
    """Parse a command line whose parser knows nothing of configuration files; --config and --debug are added to it here.

    Raises UserError for a file or a variable that cannot be; argparse ends the process for a command line that cannot be.
    """
    parser.add_argument("--config", metavar="FILE.yaml", help="options, a flag's name a key; flags go before them")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    names = {name: dest for name, dest in _options(parser).items() if PREFIX + name.upper() in environment}
    with _nothing_required(parser):
        flags = _given(parser, arguments)
        file = f"config {flags.get('config')}"
        config = read_config(flags["config"], parser) if "config" in flags else {}
        variables = {dest: environment[PREFIX + name.upper()] for name, dest in names.items()}
        # What is less weighty and excluded by something weightier is left out.
        from_environment = _parsed(parser, variables, set(flags), f"the environment ({PREFIX}…)")
        from_config = _parsed(parser, config, {*flags, *from_environment}, f"the configuration {flags.get('config')}")
    # Last, with what the whole needs, to say what is missing as argparse does.
    earlier = [word for part in (from_config, from_environment) for words in part.values() for word in words]
    values = vars(parser.parse_args([*earlier, *(sys.argv[1:] if arguments is None else arguments)]))
    origins = dict.fromkeys(values, "default") | dict.fromkeys(from_config, file)
    origins |= {dest: f"environment {PREFIX}{name.upper()}" for name, dest in names.items() if dest in from_environment}
    origins |= dict.fromkeys(flags, "flag")
    for name in HIDDEN:
        values.pop(name, None)
    dests = {action.dest: _flag(action)[2:] for action in _actions(parser)}
    return Given(values, {name: origins[name] for name in values}, {name: dests[name] for name in values})


def read_config(path: str, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Option -> value of a YAML file. Raises UserError for what is no such file, and for keys that are no options."""
    import yaml

    try:
        data = Path(path).expanduser().read_bytes()
    except OSError as error:
        raise UserError(f"the configuration {path} cannot be read ({error.strerror})") from error
    if len(data) > MAX_BYTES:
        raise UserError(f"the configuration {path} has {len(data):,} bytes, over the limit of {MAX_BYTES:,}")
    try:
        found = yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        place = getattr(error, "problem_mark", None)
        line = "" if place is None else f" at line {place.line + 1}"
        raise UserError(f"the configuration {path} is not valid YAML{line}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise UserError(f"the configuration {path} must hold keys and values, one a line: store: s3://bucket/prefix")
    known = _options(parser)
    config: dict[str, Any] = {}
    for key, value in found.items():
        name = known.get(str(key).replace("-", "_"))
        if name is None:
            near = difflib.get_close_matches(str(key).replace("-", "_"), known, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            raise UserError(f"the configuration {path} has the unknown key {str(key)!r:.100}{hint}")
        if name in config:
            raise UserError(f"the configuration {path} gives {key} twice")
        config[name] = value
    return config


def _options(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Name of a flag, with underscores -> name of its value."""
    return {_flag(action)[2:].replace("-", "_"): action.dest for action in _actions(parser)}


def _actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings and action.dest not in HIDDEN]


def _flag(action: argparse.Action) -> str:
    return action.option_strings[-1]


def _parsed(
    parser: argparse.ArgumentParser, given: Mapping[str, Any], taken: set[str], where: str
) -> dict[str, list[str]]:
    """Option -> words of a command line that mean the same, of those not taken, each found to be what the parser takes."""
    actions = {action.dest: action for action in _actions(parser)}
    found: dict[str, list[str]] = {}
    for name, value in given.items():
        action = actions[name]
        excluded = {
            other.dest for group in parser._mutually_exclusive_groups if action in group._group_actions
            for other in group._group_actions
        }  # fmt: skip
        if value is None or ({name} | excluded) & taken:
            continue
        words = _words(action, value, where)
        with _errors(parser, where):
            parser.parse_args(words)
        if words:
            found[name] = words
    return found


def _words(action: argparse.Action, value: Any, where: str) -> list[str]:
    flag = _flag(action)
    if isinstance(action, argparse._StoreTrueAction):
        truth = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
        if truth is None:
            raise UserError(f"{where}: {flag[2:]} must be true or false, not {str(value)!r:.100}")
        return [flag] if truth else []
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and not isinstance(action, argparse._AppendAction):
        raise UserError(f"{where}: {flag[2:]} takes one value, not a list")
    if any(isinstance(item, dict | list | bool) for item in values):
        raise UserError(f"{where}: {flag[2:]} takes a name or a number, not {str(value)!r:.100}")
    return [f"{flag}={item}" for item in values]


def _given(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> dict[str, Any]:
    """What was given and nothing else: argparse sets no default where there is a value, and no flag's value is None."""
    blank = argparse.Namespace(**{action.dest: None for action in parser._actions})
    return {name: value for name, value in vars(parser.parse_args(arguments, blank)).items() if value is not None}


@contextmanager
def _nothing_required(parser: argparse.ArgumentParser) -> Iterator[None]:
    """A parser that misses nothing."""
    required = [one for one in (*parser._actions, *parser._mutually_exclusive_groups) if one.required]
    for one in required:
        one.required = False
    try:
        yield
    finally:
        for one in required:
            one.required = True


@contextmanager
def _errors(parser: argparse.ArgumentParser, where: str) -> Iterator[None]:
    """What the parser finds wrong is a UserError that says where it stands."""

    def error(message: str) -> NoReturn:
        raise UserError(f"{where}: {message.removeprefix('argument ')}")

    parser.error = error  # type: ignore[method-assign]
    try:
        yield
    finally:
        del parser.error
