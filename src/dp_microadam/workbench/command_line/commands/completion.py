"""``dp-microadam completion``: the shell code that makes Tab complete commands, options and their values."""

from __future__ import annotations

import argparse

_INSTALL = {
    "bash": 'eval "$(dp-microadam completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(dp-microadam completion zsh)"  # in ~/.zshrc, after compinit',
    "fish": "dp-microadam completion fish > ~/.config/fish/completions/dp-microadam.fish",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print the code that enables Tab completion in your shell",
        description="Print shell code that completes commands, options, recipes, run folders, data sets and recipe settings "
        "when you press Tab.",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in _INSTALL.values()),
    )
    parser.add_argument("shell", choices=tuple(_INSTALL), help="which shell")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    import argcomplete

    print(argcomplete.shellcode(["dp-microadam"], shell=options.shell), end="")
    return 0
