"""``dp-microadam completion``: what the Tab key completes to, in bash, zsh and fish. No torch here, so Tab answers at once."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Mapping

_ASKED = "words"
"""What the scripts ask for: ``dp-microadam completion words LINE``, the line as it was typed up to the cursor."""

_SCRIPTS = {
    "bash": r"""_dp_microadam() {
    local IFS=$'\n' line="${COMP_LINE:0:COMP_POINT}"
    COMPREPLY=($(dp-microadam completion words "$line" 2>/dev/null))
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
    # bash ends a word at '=': it wants what comes after it.
    [[ ${line##* } == *=* && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
    return 0
}
complete -o default -F _dp_microadam dp-microadam
""",
    "zsh": r"""#compdef dp-microadam
_dp_microadam() {
    local -a found
    found=(${(f)"$(dp-microadam completion words "$LBUFFER" 2>/dev/null)"})
    if (( $#found )); then
        compadd -Q -S '' -- $found
    else
        _files
    fi
}
compdef _dp_microadam dp-microadam
""",
    "fish": r"""complete -c dp-microadam -a '(dp-microadam completion words (commandline -cp) 2>/dev/null)'
""",
}

_WHERE = {
    "bash": 'eval "$(dp-microadam completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(dp-microadam completion zsh)" after compinit in ~/.zshrc',
    "fish": "dp-microadam completion fish > ~/.config/fish/completions/dp-microadam.fish",
}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="complete commands, options, recipes and settings by the Tab key",
        description="Print what makes a shell complete commands, options, recipes, data sets and settings.",
        epilog="examples:\n" + "\n".join(f"  {line}" for line in _WHERE.values()),
    )
    parser.add_argument("shell", metavar="{bash,zsh,fish}", choices=(*_SCRIPTS, _ASKED), help="which shell")
    parser.add_argument("line", nargs="?", default="", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.shell != _ASKED:
        print(_SCRIPTS[options.shell], end="")
        return 0
    from dp_microadam.apps.command_line.cli import build_parser

    for word in candidates(build_parser(), _words(options.line)):
        print(word)
    return 0


def candidates(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """What the last of ``words`` may become, after those before it; empty where a file belongs."""
    *before, current = words or [""]
    waiting: argparse.Action | None = None
    taken = 0
    for word in before:
        if waiting is not None:
            waiting = None
        elif word.startswith("-"):
            action = parser._option_string_actions.get(word)
            waiting = action if action is not None and action.nargs != 0 else None
        elif word in _subcommands(parser):
            parser, taken = _subcommands(parser)[word], 0
        else:
            taken += 1
    if waiting is not None:
        found = _values(waiting, current)
    elif current.startswith("-"):
        found = [name for name in parser._option_string_actions if name.startswith("--")]
    else:
        positionals = [action for action in parser._get_positional_actions() if action.dest != argparse.SUPPRESS]
        found = _subcommands(parser) or (_values(positionals[taken], current) if taken < len(positionals) else [])
    return [word for word in found if word.startswith(current)]


def _words(line: str) -> list[str]:
    """The words after the program's name; the last one is empty after a space."""
    try:
        words = shlex.split(line)
    except ValueError:  # an open quote
        words = line.split()
    return words[1:] + ([""] if line[-1:].isspace() else [])


def _subcommands(parser: argparse.ArgumentParser) -> Mapping[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _values(action: argparse.Action, current: str) -> Iterable[str]:
    if action.choices is not None:
        return [choice for choice in map(str, action.choices) if choice != _ASKED]
    return _BY_NAME.get(action.dest, lambda current: [])(current)


def _recipes(current: str) -> list[str]:
    from dp_microadam.apps.recipes import known_recipes

    return known_recipes()


def _data_sets(current: str) -> Iterable[str]:
    from dp_microadam.apps.recipes import vocabulary

    return vocabulary.DATA_SETS


def _settings(current: str) -> list[str]:
    """Keys of a recipe, or the values of one whose values have names."""
    from dataclasses import fields

    from dp_microadam.apps.recipes import vocabulary
    from dp_microadam.apps.recipes.recipe import Recipe

    key, equals, _ = current.partition("=")
    if equals:
        named = {
            "method": vocabulary.METHODS,
            "base": vocabulary.BASES,
            "model": vocabulary.MODELS,
            "data": vocabulary.DATA_SETS,
        }
        return [f"{key}={value}" for value in named.get(key, ())]
    tables = {
        "optimizer": vocabulary.OPTIMIZER_OPTIONS,
        "model_options": vocabulary.MODEL_OPTIONS,
        "data_options": vocabulary.DATA_OPTIONS,
    }
    options = {f"{table}.{name}" for table, owners in tables.items() for own in owners.values() for name in own}
    return [f"{name}=" for name in [field.name for field in fields(Recipe) if field.name not in tables] + sorted(options)]


_BY_NAME: Mapping[str, Callable[[str], Iterable[str]]] = {"recipe": _recipes, "overrides": _settings, "name": _data_sets}
"""By the name an argument has in its command."""
