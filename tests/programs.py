"""Python programs that start at once: `python SCRIPT words`, forked from a server that has imported
what they import.

    output = run(ROOT / "train.py", "experiment=demo").stdout          # as subprocess.run
    process = Program([ROOT / "eval.py", "run=x"], stdout=subprocess.PIPE)  # as subprocess.Popen

A program is a process of its own: argv, folder, environment, standard streams, signals, threads and
exit code are those of a new interpreter. Only the modules of PRELOADED are there already, and the
seed of hashes is the server's. So what a module reads when it is imported cannot be another here,
and is refused (AT_IMPORT): such a test, or one of what is imported, starts `sys.executable`.

Each process of pytest has one server; ranks (tests/distributed/launch.py) are forked from it too.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.machinery import SourceFileLoader
from multiprocessing import forkserver, process, reduction, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

PRELOADED = [
    *(f"lrattnres.commands.{name}" for name in ("train", "eval", "generate", "inspect", "export")),
    *(f"lrattnres.commands.{name}" for name in ("convert", "report", "submission", "tokenize")),
    *("lrattnres.optim.muon_adam", "lrattnres.report.plots", "lrattnres.report.inspection"),
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torchmetrics", "pandas", "hydra._internal.hydra", "pytest", "tests.programs"),
]
AT_IMPORT = re.compile(
    "PYTHON(?!PATH).*|(LC|OMP|MKL|OPENBLAS|TORCH)_.*|LANG.*|TRITON_INTERPRET|CUDA_VISIBLE_DEVICES"
    "|HF_(HOME|ENDPOINT|HUB_.*)|MPL.*|HOME|XDG_CACHE_HOME"
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
ENVIRONMENT = os.environ | ONE_THREAD
_SERVERS = dict(ENVIRONMENT)  # whatever a test changes

_MAIN_PROCESS = process.current_process()  # in the server, which imports this module
_context = multiprocessing.get_context("forkserver")


def server() -> ForkServerContext:
    """What starts processes as `multiprocessing` does, from the server, which is there then."""
    _context.set_forkserver_preload(PRELOADED)
    before = dict(os.environ)
    _replace_environment(_SERVERS)
    try:
        forkserver.ensure_running()
    finally:
        _replace_environment(before)
    return _context


class Program(subprocess.Popen[Any]):
    """A running program, with what `subprocess.Popen` has.

    Args:
        words: what follows `python`: SCRIPT, or `-c` TEXT, or `-m` MODULE, and its own words.
        env: its environment; None: this process' one, with one thread.
        new_session: makes it the leader of a session, and thereby of a group of processes.
        options: as of Popen: cwd, stdin, stdout, stderr, text and the like.
    """

    def __init__(
        self,
        words: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        new_session: bool = False,
        **options: Any,
    ):
        self._new_session = new_session
        environment = dict(env or os.environ | ONE_THREAD)
        for name in environment.keys() | _SERVERS.keys():
            if AT_IMPORT.fullmatch(name) and environment.get(name) != _SERVERS.get(name):
                raise ValueError(f"{name} is read at an import; start `sys.executable` instead")
        super().__init__(list(map(str, words)), env=environment, **options)

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
        creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *_: Any,
    ) -> None:  # fmt: skip
        streams = [
            _Stream(number if given == -1 else given)
            for number, given in enumerate((p2cread, c2pwrite, errwrite))
        ]
        found = _found_by(env.get("PYTHONPATH", ""))
        folder = str(cwd or Path.cwd())
        # A daemon, so that pytest does not wait for one that a failed test has left.
        self._process = server().Process(
            target=_live, args=(args, folder, env, found, streams, self._new_session), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            self.returncode = self._process.exitcode
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode


def run(
    *words: str | Path, input: Any = None, timeout: float | None = None, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """What a program printed, and its exit code, when it has ended.

    Args:
        words: as of Program.
        input: is its standard input; None: it has none.
        timeout: seconds until it is killed, which raises TimeoutExpired.
        options: as of Program; stdout and stderr are read as text, and others may be given.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    stdin = subprocess.DEVNULL if input is None else subprocess.PIPE
    with Program(words, stdin=stdin, **options) as program:
        try:
            printed = program.communicate(input, timeout)
        except BaseException:
            program.kill()
            raise
    return subprocess.CompletedProcess(program.args, program.returncode, *printed)


class _Stream:
    """A file descriptor that travels to the new process, and is a number there."""

    def __init__(self, number: int):
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (reduction.DupFd(self.number),)


def _arrived(stream: Any) -> int:
    number: int = stream.detach()
    return number


@functools.cache
def _found_by(path: str) -> list[str]:
    """`sys.path` of a new interpreter, but for the first entry, with that PYTHONPATH."""
    told = subprocess.run(
        [sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"],
        env=_SERVERS | {"PYTHONPATH": path}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return told.stdout.splitlines()


def _replace_environment(values: Mapping[str, str]) -> None:
    for name in os.environ.keys() - values.keys():
        del os.environ[name]
    os.environ.update(values)


# --- in the new process ---------------------------------------------------------------------------


def _live(
    words: list[str],
    folder: str,
    environment: dict[str, str],
    found: list[str],
    streams: list[int],
    new_session: bool,
) -> NoReturn:
    """All of a program's life."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if new_session:
        os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _replace_environment(environment)
    os.chdir(folder)
    _forget_the_server(folder)
    how = {"encoding": sys.stdout.encoding, "errors": sys.stdout.errors}
    sys.stdin = sys.__stdin__ = os.fdopen(0, **how)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", **how)
    how["errors"] = "backslashreplace"
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, **how)
    code = _finished(functools.partial(_main, words, found, folder))
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _forget_the_server(folder: str) -> None:
    """This is the first process of a program, and none of multiprocessing's."""
    resource_tracker._resource_tracker._fd = None
    multiprocessing.set_start_method(None, force=True)
    process._current_process, _MAIN_PROCESS.name = _MAIN_PROCESS, "MainProcess"
    process._parent_process = None
    process.ORIGINAL_DIR = folder
    sys.modules.pop("__mp_main__", None)


def _main(words: list[str], found: list[str], folder: str) -> None:
    """Runs the words as `__main__`."""
    sys.orig_argv = [sys.executable, *words]
    main = sys.modules["__main__"] = ModuleType("__main__")
    if words[0] == "-m":
        sys.path[:] = [folder, *found]
        sys.argv = ["-m", *words[2:]]
        runpy._run_module_as_main(words[1])
        return
    if words[0] == "-c":
        sys.path[:] = ["", *found]
        sys.argv = ["-c", *words[2:]]
        code = compile(words[1], "<string>", "exec")
    else:
        script = Path(words[0])
        sys.path[:] = [str(script.resolve().parent), *found]
        sys.argv = words
        main.__file__, main.__loader__ = words[0], SourceFileLoader("__main__", words[0])
        code = compile(script.read_bytes(), words[0], "exec")
    exec(code, vars(main))


def _finished(main: Any) -> int:
    """Runs it to its end; the exit code that Python would leave with."""
    try:
        main()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:
        trace = error.__traceback__
        while trace and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0
