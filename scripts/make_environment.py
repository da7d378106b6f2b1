"""Make or repair the virtual environment of a checkout, for environment.sh. Standard library only.

``make_environment.py ROOT VENV WANTED`` leaves a file ``complete`` holding WANTED in VENV as its
very last act. Whoever finds another text there, or none, calls this again: without the file the
environment is made from scratch (a set-up that was interrupted), with an outdated one it is brought
up to date in place. A lock lets only one set-up run at a time.

On Linux without a CUDA device torch comes in its CPU build (0.2 GB instead of 3): from where pip is
configured to look, else from PyTorch's own index, else, said in a line, the standard build.
``HYBRIDTRAIN_TORCH=cpu|cuda`` overrules the detection.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
QUICK = ["--timeout", "15", "--retries", "1"]  # an index that may be out of reach must say so soon


class SetupError(Exception):
    """The environment cannot be made; the message is for the person who started it."""


class Environment:
    """One virtual environment and the pip that fills it."""

    def __init__(self, root: Path, venv: Path) -> None:
        self.root, self.venv = root, venv
        self.python = venv / "bin" / "python"
        self.log = venv / "setup.log"

    def create(self) -> None:
        """Make an empty environment, with or without the ensurepip that some systems leave out."""
        shutil.rmtree(self.venv, ignore_errors=True)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        if subprocess.run([sys.executable, "-m", "venv", str(self.venv)], **quiet).returncode == 0:
            return
        bare = [sys.executable, "-m", "venv", "--clear", "--without-pip", str(self.venv)]
        done = subprocess.run(bare, capture_output=True, text=True)
        if done.returncode != 0:
            raise SetupError(f"cannot create {self.venv}: {_last_line(done.stderr + done.stdout)}")

    def pip(self, *args: str) -> bool:
        """Run ``pip install`` with ``args``, its output in the log; True when it succeeded."""
        if (self.venv / "bin" / "pip").exists():
            command = [str(self.python), "-m", "pip"]
        else:  # an environment without pip is filled by the pip outside
            command = [sys.executable, "-m", "pip", "--python", str(self.python)]
        command += ["install", "--disable-pip-version-check", "--no-input", *args]
        with self.log.open("a") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT).returncode == 0

    def must_pip(self, *args: str) -> None:
        """Run ``pip install``; raise SetupError with pip's last error where it fails."""
        if not self.pip(*args):
            errors = [x for x in self.log.read_text().splitlines() if x.startswith("ERROR")]
            reason = errors[-1] if errors else _last_line(self.log.read_text())
            raise SetupError(f"pip failed: {reason} (the whole log: {self.log})")

    def install_torch(self) -> None:
        """Install the pinned torch, in its CPU build where that is the one to have."""
        pins = (self.root / "constraints.txt").read_text()
        version = re.search(r"^torch==([\w.]+)$", pins, re.MULTILINE)
        assert version is not None, "constraints.txt pins torch"
        torch = f"torch=={version[1]}"
        if not _wants_cpu_build():
            say(f"installing {torch}")
        else:
            say(f"installing {torch} (CPU build)")
            if self.pip("--no-deps", *QUICK, f"{torch}+cpu"):
                return
            if self.pip("--no-deps", *QUICK, "--index-url", CPU_INDEX, f"{torch}+cpu"):
                return
            say(f"no CPU build to be had ({CPU_INDEX} cannot be reached): taking the standard one")
        self.must_pip("--no-deps", torch)

    def install_rest(self) -> None:
        """Install the project, editable, with every extra, at the pinned versions."""
        say("installing hybridtrain and what it needs")
        pins = str(self.root / "constraints.txt")
        self.must_pip("--constraint", pins, "--editable", f"{self.root}[all,test,dev]")


def _wants_cpu_build() -> bool:
    choice = os.environ.get("HYBRIDTRAIN_TORCH", "auto")
    if choice not in ("auto", "cpu", "cuda"):
        raise SetupError(f"HYBRIDTRAIN_TORCH={choice} is none of auto, cpu, cuda")
    if choice != "auto" or platform.system() != "Linux":  # elsewhere there is one build only
        return choice == "cpu"
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return True
    found = subprocess.run([smi, "-L"], capture_output=True, text=True)
    return found.returncode != 0 or "GPU" not in found.stdout


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no reason given"


def say(text: str) -> None:
    """Tell the person who waits; on stderr, so that a command's own output stays clean."""
    print(f"[set-up] {text}", file=sys.stderr, flush=True)


def make(root: Path, venv: Path, wanted: str) -> None:
    """Bring ``venv`` to the state named ``wanted``; the file ``complete`` is written last."""
    marker = venv / "complete"
    environment = Environment(root, venv)
    usable = marker.exists() and environment.python.exists()
    if usable and marker.read_text().strip() == wanted:
        return  # another set-up finished while this one waited for the lock
    began = time.monotonic()
    say(f"{'updating' if usable else 'making'} {venv} (once; it takes a few minutes)")
    marker.unlink(missing_ok=True)
    if not usable:
        environment.create()
    environment.install_torch()
    environment.install_rest()
    marker.write_text(wanted + "\n")
    say(f"done in {time.monotonic() - began:.0f} s")


def main(root: Path, venv: Path, wanted: str) -> int:
    """Make the environment under a lock that the system drops when this process ends."""
    try:
        venv.parent.mkdir(parents=True, exist_ok=True)
        lock = (venv.parent / f"{venv.name}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another set-up is running; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        make(root, venv, wanted)
    except (SetupError, OSError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        say("interrupted; the next start begins anew")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].strip()))
