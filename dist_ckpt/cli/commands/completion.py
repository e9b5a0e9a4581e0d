"""The command `completion`: print the script that completes words in a shell."""

from __future__ import annotations

import os
import re

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ZshComplete,
    split_arg_string,
)


class BashWords(BashComplete):
    """Completion for bash. In bash a word ends at an @ or a colon, as in runs/a@min:loss.

    So the words are read from the command line, not from bash. bash gets only the end of a word:
    the part that replaces the last word of bash.
    """

    source_template = """\
%(complete_func)s() {
    local IFS=$'\\n' words type value
    words=$(env COMP_LINE="${COMP_LINE:0:COMP_POINT}" COMP_BREAKS="$COMP_WORDBREAKS" \\
        %(complete_var)s=bash_complete "$1")
    COMPREPLY=()
    while IFS=, read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done <<< "$words"
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words before the cursor, and the word at the cursor. Called by click."""
        line = os.environ["COMP_LINE"]
        words = split_arg_string(line)
        incomplete = "" if line[-1:].isspace() or len(words) < 2 else words.pop()
        return words[1:], incomplete

    def format_completion(self, item: CompletionItem) -> str:
        """Return the text that replaces the last word of bash. Called by click."""
        _, incomplete = self.get_completion_args()
        breaks = [char for char in ":=@" if char in os.environ.get("COMP_BREAKS", "")]
        end = max((incomplete.rfind(char) for char in breaks), default=-1)
        # readline ends a word before an @, and after the other characters.
        earlier_words = incomplete[: end + (incomplete[end : end + 1] != "@")]
        # A name in a checkpoint of another user may be `$(...)`. zsh and fish quote the word, bash
        # does not.
        word = re.sub(r"[^\w%+,./:=@-]", r"\\\g<0>", item.value.removeprefix(earlier_words))
        return f"{item.type},{word}"


class FishWords(FishComplete):
    """Completion for fish. In fish a word may contain a comma."""

    source_template = FishComplete.source_template.replace("split", "split -m 1")


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and paths in a shell.

    It completes selectors after an @, such as runs/a@latest, and names in a checkpoint after -g.

    \b
    dist-ckpt completion bash >> ~/.bashrc
    dist-ckpt completion zsh >> ~/.zshrc
    dist-ckpt completion fish > ~/.config/fish/completions/dist-ckpt.fish
    """
    shell_class = {"bash": BashWords, "zsh": ZshComplete, "fish": FishWords}[shell]
    command = ctx.find_root().command
    click.echo(shell_class(command, {}, "dist-ckpt", "_DIST_CKPT_COMPLETE").source())
