"""A forked Python is what a fresh one would be: its arguments, its streams, its end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fork_server import forked_python

pytestmark = pytest.mark.multi_process


def run(
    *words: str, env: dict[str, str] | None = None, cwd: Path | None = None, typed: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [forked_python(), *words],
        env=env,
        cwd=cwd,
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


TRACEBACK = "Traceback (most recent call last):\n"
SHOW = (
    "import os, sys; print(__name__, sys.argv, os.getcwd(), os.environ['A'], sys.stdin.read()); "
    "print('torch' in sys.modules, sys.path[0], file=sys.stderr)"
)


def test_a_program_sees_its_arguments_folder_environment_and_streams(tmp_path: Path) -> None:
    env = {"A": "\N{SNOWMAN}"}
    done = run("-c", SHOW, "x", "", cwd=tmp_path, typed="typed", env=env)
    assert done.stdout == f"__main__ ['-c', 'x', ''] {tmp_path} \N{SNOWMAN} typed\n"
    assert done.stderr == "True \n"
    script = tmp_path / "sub" / "script.py"
    script.parent.mkdir()
    script.write_text(SHOW)
    done = run("-u", "sub/script.py", "x", cwd=tmp_path, typed="typed", env=env)
    assert done.stdout == f"__main__ ['sub/script.py', 'x'] {tmp_path} \N{SNOWMAN} typed\n"
    assert done.stderr == f"True {script.parent}\n"


def test_a_module_is_run_as_a_program() -> None:
    assert run("-m", "dist_ckpt", "--version").stdout.startswith("dist-ckpt, version ")


@pytest.mark.parametrize(
    ("code", "ended", "said"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(5)", 5, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        (
            "1 / 0",
            1,
            'Traceback (most recent call last):\n  File "<string>", line 1, in <module>\n',
        ),
        ("raise KeyboardInterrupt", -signal.SIGINT, "Traceback"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import atexit; atexit.register(print, 'bye')", 0, ""),
    ],
)
def test_it_ends_as_its_program_ends(code: str, ended: int, said: str) -> None:
    done = run("-c", code)
    assert (done.returncode, done.stderr[: len(said)]) == (ended, said)
    assert done.stdout == ("bye\n" if "bye" in code else "")
    assert said or not done.stderr


def test_it_has_the_open_files_and_the_session_of_its_own_that_it_was_given() -> None:
    code = "import os, sys; print(sys.path[0] != '', os.getsid(0) == os.getpid(), os.read({}, 9))"
    read_end, write_end = os.pipe()
    os.write(write_end, b"inherited")
    done = subprocess.run(
        [forked_python(), "-P", "-c", code.format(read_end)],
        pass_fds=[read_end],
        start_new_session=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == b"True True b'inherited'\n", done.stderr
    os.close(read_end)
    os.close(write_end)


def test_a_signal_is_handed_on() -> None:
    code = "import signal; print('ready', flush=True); signal.pause()"
    with subprocess.Popen([forked_python(), "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == -signal.SIGTERM


def test_what_it_has_started_dies_with_it() -> None:
    code = "import os; os.system('echo $$; exec sleep 1000')"
    with subprocess.Popen([forked_python(), "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        sleeps = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    # Readable once it has ended.
    assert select.select([sleeps], [], [], 60)[0] == [sleeps]
    os.close(sleeps)


def wait_for_state(pid: int, state: str) -> None:
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != state:
        time.sleep(0.01)


def test_the_server_survives_a_program_that_is_killed_as_it_ends() -> None:
    code = "import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(60)"
    with subprocess.Popen([forked_python(), "-c", code], stdout=subprocess.PIPE) as program:
        assert program.stdout is not None
        child, server = map(int, program.stdout.readline().split())
        os.kill(server, signal.SIGSTOP)
        try:
            wait_for_state(server, "T")
            os.kill(child, signal.SIGKILL)
            wait_for_state(child, "Z")  # the server hears of this first
            program.kill()
            program.wait()
        finally:
            os.kill(server, signal.SIGCONT)
    assert run("-c", "print(1)").stdout == "1\n"


def test_what_it_starts_is_forked_too() -> None:
    code = "import sys; sys.exit('torch' in sys.modules and 7)"
    start = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
    assert run("-c", start, code).returncode == 7


def test_warnings_are_what_its_options_and_its_environment_say() -> None:
    code = "import warnings; warnings.warn('mind', UserWarning)"
    assert run("-c", code).stderr.endswith("mind\n")
    assert run("-W", "ignore", "-c", code).stderr == ""
    assert run("-c", code, env={"PYTHONWARNINGS": "ignore"}).stderr == ""
    assert run("-c", code, env={"PYTHONWARNINGS": "error"}).returncode == 1


@pytest.mark.parametrize(
    ("options", "environ"), [(["-S"], {}), (["-Werror"], {}), ([], {"PYTHONHASHSEED": "1"})]
)
def test_what_a_fork_cannot_be_is_a_fresh_python(
    options: list[str], environ: dict[str, str]
) -> None:
    code = "import sys; print('torch' in sys.modules, sys.executable)"
    done = run(*options, "-c", code, env={**os.environ, **environ})
    assert done.stdout == f"False {sys.executable}\n"


def test_forks_draw_other_random_numbers() -> None:
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    first, second = (run("-c", code).stdout.split() for _ in range(2))
    assert len({*first, *second}) == 4


@pytest.mark.long
def test_modules_that_are_asked_for_are_there_already() -> None:
    code = "import sys; print('tabnanny' in sys.modules)"
    command = [forked_python("tabnanny"), "-c", code]
    assert subprocess.run(command, capture_output=True, check=True).stdout == b"True\n"
    assert run("-c", code).stdout == "False\n"


def test_many_run_at_once() -> None:
    code = "import sys; print(sys.stdin.readline(), end='')"
    pipe = subprocess.PIPE
    many = [
        subprocess.Popen([forked_python(), "-c", code], stdin=pipe, stdout=pipe, text=True)
        for _ in range(20)
    ]
    for number, process in enumerate(many):
        assert process.communicate(f"{number}\n", timeout=60)[0] == f"{number}\n"
