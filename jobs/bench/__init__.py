"""The benchmarks behind `jobs/benchmark.py`: one module a sub-command.

A module of this package that is a sub-command has three functions, and is named in COMMANDS of `jobs/benchmark.py`:

    add_arguments(parser)     its options; nothing is computed and no model is looked at
    run(arguments) -> dict    the figures as plain data for JSON; `verified` is false where something came back wrong
    rows(result) -> list      the same for people: (name, value) pairs

What several of them need is beside them: `prompts` (reading prompts), `machine` (threads, memory, description), `turns` (timing sides
against each other), `child` (a process of its own) and `decode_process` (decoding stored chunks in one).
"""
