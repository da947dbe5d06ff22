#!/usr/bin/env python3
"""Write a small agentic corpus made of text that every Python installation has.

    python jobs/demo_corpus.py --out corpus.jsonl [--prompts 8] [--seed 0]

Three agents (files, text, data), each with a system prompt and tools whose JSON schemas are derived from the signatures
of real standard-library functions; tool results are source code of the standard library. Prompts of one agent share its
system prompt and tools, and some of them the first tool result too, so that there is something to share between them.
The same Python, number of prompts and seed give the same file.
"""

import argparse
import ast
import importlib
import inspect
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SYSTEM = """You are {name}, a careful assistant that works for a team of Python developers. {task}
Work step by step. Before you answer, read the source that you talk about: call a tool, wait for its result, and quote
the lines that your answer rests on. Never guess what a function does from its name, and never invent a parameter.
Make one tool call at a time, as a JSON object with the keys "name" and "arguments". If a tool reports an error, say so
and try another way once. Do not change anything before the user has agreed. Keep answers short: the finding first, then
the reason, then what you would do next. If a question has nothing to do with the code at hand, say so and stop."""

# name, task, functions offered as tools, sources that a tool can return
AGENTS: list[tuple[str, str, list[str], list[str]]] = [
    (
        "Filer",
        "You find, copy and tidy up files and explain what the code that handles them does.",
        ["os.path.relpath", "shutil.copyfile", "shutil.move", "os.walk"],
        ["shutil.copyfile", "shutil.move", "os.walk", "shutil.which", "posixpath.relpath", "fnmatch.translate"],
    ),
    (
        "Scribe",
        "You search, rewrite and format text and explain what the code that does it promises.",
        ["re.sub", "re.split", "textwrap.shorten", "string.capwords"],
        ["textwrap.dedent", "difflib.unified_diff", "re.escape", "string.capwords", "textwrap.indent", "shlex.split"],
    ),
    (
        "Clerk",
        "You read and write structured records, summarise numbers and explain how the code arrives at them.",
        ["statistics.quantiles", "bisect.insort", "heapq.merge"],
        ["statistics.quantiles", "json.dumps", "heapq.merge", "json.loads", "statistics.median", "heapq.nsmallest"],
    ),
]

QUESTIONS = [
    "What does {first} do with input that it cannot handle?",
    "Is it safe to call {first} from two threads at once? Look at the source first.",
    "Summarise {first} in three sentences for a colleague who has never used it.",
    "Which parameters of {first} could be left out by almost every caller, and why?",
]
FOLLOW_UPS = [
    "Now compare it with {second}. Which of the two would you rather maintain?",
    "Does {second} make the same assumptions? Quote the line that shows it.",
    "Then look at {second}: is there anything in it that the first one could reuse?",
]
TOOL_LIMIT = 180  # characters of a function's documentation in a schema
SOURCE_LIMIT = 720  # characters of source in a tool result


class NoSource(Exception):
    """This Python comes without the source of its library."""


def read_source(function: str) -> str:
    """Return the source code of a function of the standard library."""
    return source(function)


def resolve(name: str) -> Callable[..., Any]:
    """The function of a dotted name, for instance os.path.join."""
    module, _, attribute = name.rpartition(".")
    function: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
    return function


def schema(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """An OpenAI-style tool schema made from a function's signature and documentation."""
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in parameters(function):
        properties[parameter.name] = {"type": json_type(parameter), "description": describe(parameter)}
        if parameter.default is inspect.Parameter.empty and parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            required.append(parameter.name)
    text = cut(inspect.getdoc(function) or f"Calls {name}.", TOOL_LIMIT)
    arguments = {"type": "object", "properties": properties, "required": required}
    function_schema = {"name": name.replace(".", "_"), "description": text, "parameters": arguments}
    return {"type": "function", "function": function_schema}


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """What the function can be called with; some functions written in C do not say."""
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:
        return []
    return [p for p in found if p.kind is not inspect.Parameter.VAR_KEYWORD]


def json_type(parameter: inspect.Parameter) -> str:
    """The JSON type that a parameter's default suggests."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        return "array"
    kinds = {bool: "boolean", int: "integer", float: "number", tuple: "array", list: "array"}
    return kinds.get(type(parameter.default), "string")


def describe(parameter: inspect.Parameter) -> str:
    """Half a sentence about a parameter."""
    default = parameter.default
    if default is inspect.Parameter.empty:
        return "Required."
    # Functions and sentinels print with an address, which differs from run to run.
    plain = default is None or isinstance(default, (bool, int, float, str))
    return f"Optional, {default!r} if left out." if plain else "Optional."


def source(name: str) -> str:
    """The beginning of a function's source, cut at a line's end. Raises NoSource."""
    function = resolve(name)
    # Not inspect.getsource: os and its like are frozen into the interpreter, and it does not find their files.
    file = getattr(sys.modules[function.__module__], "__file__", None)
    if not file or not file.endswith(".py") or not Path(file).is_file():
        raise NoSource(f"this Python comes without the source of {name}; use one that has its whole library")
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    for node in ast.walk(ast.parse("\n".join(lines))):
        if isinstance(node, ast.FunctionDef) and node.name == function.__name__:
            return cut("\n".join(lines[node.lineno - 1 : node.end_lineno]), SOURCE_LIMIT)
    raise NoSource(f"the source of {name} is not in its module")


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, whole lines."""
    if len(text) <= limit:
        return text.rstrip()
    return text[: text.rfind("\n", 0, limit)].rstrip() if "\n" in text[:limit] else text[:limit].rstrip()


def conversation(agent: int, turn: int, chosen: random.Random) -> list[dict[str, str]]:
    """The messages of one prompt. Turns 2n and 2n + 1 of an agent read the same source first."""
    name, task, _, sources = AGENTS[agent]
    first = sources[turn // 2 % len(sources)]
    second = chosen.choice([s for s in sources if s != first])
    messages = [{"role": "system", "content": SYSTEM.format(name=name, task=task)}]
    messages += [{"role": "user", "content": f"Please read {first} before we begin."}, *reading(first)]
    question = QUESTIONS[(turn + chosen.randrange(2) * 2) % len(QUESTIONS)]
    messages.append({"role": "user", "content": question.format(first=first)})
    if turn % 2:
        messages += reading(second)
        messages.append({"role": "user", "content": chosen.choice(FOLLOW_UPS).format(second=second)})
    return messages


def reading(name: str) -> Iterator[dict[str, str]]:
    """A call of the tool that shows sources, and its result."""
    call = json.dumps({"name": "read_source", "arguments": {"function": name}})
    yield {"role": "assistant", "content": call}
    yield {"role": "tool", "content": source(name)}


def records(prompts: int, seed: int) -> Iterator[dict[str, Any]]:
    """The corpus, a record a prompt, agents in turn."""
    chosen = random.Random(seed)
    for number in range(prompts):
        agent, turn = number % len(AGENTS), number // len(AGENTS)
        name, _, functions, _ = AGENTS[agent]
        tools = {"read_source": read_source} | {function: resolve(function) for function in functions}
        yield {
            "id": f"demo-{name.lower()}-{turn}",
            "tools": [schema(*tool) for tool in tools.items()],
            "messages": conversation(agent, turn, chosen),
        }


def write(path: Path, lines: Iterator[str]) -> int:
    """Write the lines to a temporary file and move it into place; returns how many there were."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            count = sum(1 for line in lines if file.write(line + "\n"))
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return count


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, or 2 when the file cannot be written."""
    parser = argparse.ArgumentParser(description="Write a small agentic corpus made of the Python standard library.")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE.jsonl", help="where to write it")
    parser.add_argument("--prompts", type=int, default=8, metavar="N", help="how many prompts (default: 8)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the questions and second sources (default: 0)")
    options = parser.parse_args(argv)
    if options.prompts < 1:
        parser.error("--prompts must be 1 or more")
    lines = (json.dumps(record, ensure_ascii=False) for record in records(options.prompts, options.seed))
    try:
        count = write(options.out, lines)
    except NoSource as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"cannot write {str(options.out)!r}: {error.strerror}")
    print(f"{options.out}: {count} prompts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
