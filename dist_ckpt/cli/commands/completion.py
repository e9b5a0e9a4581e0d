"""The command `completion`: print the script that completes words in a shell."""

from __future__ import annotations

import os

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    get_completion_class,
    split_arg_string,
)


class BashWords(BashComplete):
    """Completes in bash, for which a word ends at an @ or a colon, and so in runs/a@min:loss.

    click would be given bash's words. Here they are taken from the line, and bash is given what
    takes the place of the last of its own.
    """

    source_template = """\
%(complete_func)s() {
    local IFS=$'\\n' found type value
    found=$(env COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_BREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1")
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done <<< "$found"
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the one that is begun. Called by click."""
        line = os.environ["COMP_LINE"]
        words = split_arg_string(line)
        begun = "" if line[-1:].isspace() or len(words) < 2 else words.pop()
        return words[1:], begun

    def format_completion(self, item: CompletionItem) -> str:
        """Return what bash puts in the place of its own last word. Called by click."""
        _, begun = self.get_completion_args()
        breaks = [char for char in ":=@" if char in os.environ.get("COMP_BREAKS", "")]
        end = max((begun.rfind(char) for char in breaks), default=-1)
        # readline ends a word before an @ and behind the others.
        there = begun[: end + (begun[end : end + 1] != "@")]
        return f"{item.type},{item.value.removeprefix(there)}"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print what has a shell complete commands, options and paths.

    \b
    dist-ckpt completion bash >> ~/.bashrc
    dist-ckpt completion zsh >> ~/.zshrc
    dist-ckpt completion fish > ~/.config/fish/completions/dist-ckpt.fish
    """  # noqa: D301 - click knows the backspace
    shell_class = BashWords if shell == "bash" else get_completion_class(shell)
    assert shell_class is not None
    command = ctx.find_root().command
    click.echo(shell_class(command, {}, "dist-ckpt", "_DIST_CKPT_COMPLETE").source())
