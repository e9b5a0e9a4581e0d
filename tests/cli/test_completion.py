"""The words that a shell completes: asked of the command, and typed into real shells."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

import dist_ckpt as dc
from dist_ckpt.cli import cli
from docs_blocks import ROOT, write_commands
from fork_server import forked_python
from long_mode import sample

torch = pytest.importorskip("torch")

Run = Callable[..., tuple[int, str, str]]

SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source <(dist-ckpt completion bash)"),
    "zsh": (
        ["zsh", "-f", "-i"],
        "autoload -Uz compinit; compinit -u -D; source <(dist-ckpt completion zsh); bindkey -e",
    ),
    "fish": (["fish", "--no-config", "-i"], "dist-ckpt completion fish | source"),
}

BEGUN = {
    "show run@lat": ["show", "run@latest"],
    "show run@min:l": ["show", "run@min:loss"],
    "cp run@tag:b": ["cp", "run@tag:best"],
    "tensors run@1 -g model.w": ["tensors", "run@1", "-g", "model.w"],
    "stat": ["stats"],
}

# Each begins with two characters of its own. A shell that takes one as it is writes a file `x`.
HOSTILE = [
    *("a0$(touch${IFS}x)", "a1`touch x`", "a2;touch x", "a3|touch x", "a4&touch x&", "a5>x"),
    *("a6 b", "a7it's", 'a8"q"', "a9!!", "b0$HOME", "b1\\b", "b2*", "b3[x]", "b4~", "b5{a,b}"),
    *("b6#c", "b7é", "b8(x)", "b9=c", "c0@d:e", "c1,x", "c2%s", "c3^x"),
]


@pytest.fixture
def root(two_steps: Path) -> Path:
    return two_steps


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_printed(shell: str, run: Run) -> None:
    code, told, _ = run("completion", shell)
    assert code == 0
    assert "_DIST_CKPT_COMPLETE" in told


def test_a_shell_asks_the_program_what_completes_a_word() -> None:
    environment = {**os.environ, "_DIST_CKPT_COMPLETE": "bash_complete"}
    environment |= {"COMP_LINE": "dist-ckpt tens"}
    code_ = "from dist_ckpt.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code_],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "plain,tensors\n"


@pytest.mark.parametrize(
    ("given", "begun", "offered"),
    [
        (["show"], "{root}@", ["latest", "1", "2", "min:loss", "max:loss", "tag:best"]),
        (["show"], "{root}@m", ["min:loss", "max:loss"]),
        (["diff", "a"], "{root}@tag", ["tag:best"]),
        (["show"], "{root}-gone@", []),
        (["tensors", "{root}@1", "-g"], "", ["model", "optim"]),
        (["tensors", "{root}@1", "-g"], "model.", ["model.b", "model.w"]),
        (["diff", "{root}@1", "{root}@2", "--exclude"], "o", ["optim"]),
        (["tensors", "{root}-gone", "-g"], "", []),
        (["export", "--format", "torch", "{root}@1", "f", "-g"], "model.", ["model.b", "model.w"]),
        (["export", "--format", "hf", "{root}@1", "f", "--only"], "", ["model", "optim"]),
        (["strip", "{root}@1"], "o", ["optim"]),
        (["strip", "{root}-gone"], "o", []),
    ],
)
def test_a_shell_is_offered_checkpoints_and_names(
    given: list[str], begun: str, offered: list[str], root: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dc.Run(root).tag(1, "best")
    shell = ShellComplete(cli, {}, "dist-ckpt", "_DIST_CKPT_COMPLETE")
    words = [one.format(root=root) for one in given]
    found = shell.get_completions(words, begun.format(root=root))
    assert [one.value.removeprefix(f"{root}@") for one in found] == offered
    assert capfd.readouterr() == ("", "")


class Shell:
    """A shell on a terminal of its own, in a folder, that has loaded the completion."""

    def __init__(self, name: str, folder: Path) -> None:
        command, load = SHELLS[name]
        if shutil.which(name) is None:
            pytest.skip(f"there is no {name}")
        commands = write_commands(folder / "bin", forked_python())
        self._ours, theirs = pty.openpty()
        self._process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", *command],
            cwd=folder,
            env={
                **os.environ,
                "PATH": f"{commands}:{os.environ['PATH']}",
                "TERM": "xterm" if name == "fish" else "dumb",
                "HISTFILE": "",
                "HOME": str(folder),
                "PYTHONPATH": str(ROOT),
            },
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        self._folder = folder
        self.type(f"{load}; touch loaded\n", until="loaded")

    def type(self, text: str, *, until: str) -> None:
        """Type a text, and read what the shell shows until there is a file."""
        os.write(self._ours, text.encode())
        while not (self._folder / until).exists():
            readable, _, _ = select.select([self._ours], [], [], 0.1)
            shown = os.read(self._ours, 65536) if readable else b""
            if b"\x1b[c" in shown:  # fish asks the terminal what it is
                os.write(self._ours, b"\x1b[?1;2c")

    def completed(self, line: str) -> list[str]:
        """Return the words of a command that was completed at its end."""
        file = self._folder / "words"
        file.unlink(missing_ok=True)
        # Ctrl-A and Ctrl-E go to the ends of the line.
        self.type(f"{line}\t\x01printf '%s\\0' \x05 > new && mv new words\n", until="words")
        return file.read_text().split("\0")[:-1]

    def close(self) -> None:
        """Hang up, which ends the shell."""
        os.close(self._ours)
        self._process.wait(timeout=60)


@pytest.mark.multi_process
def test_a_real_bash_completes_what_it_ends_words_in(root: Path, tmp_path: Path) -> None:
    dc.Run(root).tag(1, "best")
    with closing(Shell("bash", tmp_path)) as shell:
        assert {line: shell.completed(f"dist-ckpt {line}")[1:] for line in BEGUN} == BEGUN


@pytest.mark.multi_process
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SHELLS)
def test_a_name_of_somebody_else_is_completed_as_text_and_never_run(
    name: str, root: Path, tmp_path: Path
) -> None:
    for tag in HOSTILE:
        dc.Run(root).tag(1, tag)
    with closing(Shell(name, tmp_path)) as shell:
        # The other shells quote by themselves.
        for tag in sample(HOSTILE, 2 if name == "bash" else 4):
            assert shell.completed(f"dist-ckpt show run@tag:{tag[:2]}")[2:] == [f"run@tag:{tag}"]
    assert not (tmp_path / "x").exists()


def test_a_name_in_a_pattern_matches_itself(tmp_path: Path) -> None:
    dc.save({"m": {"a[0]": torch.ones(2), "a0": torch.ones(2)}}, tmp_path / "ck")
    shell = ShellComplete(cli, {}, "dist-ckpt", "_DIST_CKPT_COMPLETE")
    found = shell.get_completions(["tensors", str(tmp_path / "ck"), "-g"], "m.a[")
    assert [item.value for item in found] == ["m.a[[]0]"]


def test_a_name_with_a_control_character_is_not_offered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dc.save({"m": {"a\x1b[2J": torch.ones(2), "b": torch.ones(2)}}, tmp_path / "ck")
    shell = ShellComplete(cli, {}, "dist-ckpt", "_DIST_CKPT_COMPLETE")
    found = shell.get_completions(["tensors", str(tmp_path / "ck"), "-g"], "m.")
    assert [item.value for item in found] == ["m.b"]
    assert capfd.readouterr() == ("", "")
