"""Make a small project of your own: module, data, configuration, test, CI file and Dockerfile.

    python -m hybridtrain new DIR

DIR must be empty, or not there yet. Its last part names the Python package in it and the task that
`--config-dir conf task=NAME` chooses. Letters become small; `-`, `.` and blanks become `_`.
"""

from __future__ import annotations

import keyword
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from string import Template

from hybridtrain.cli.hydra_config import groups
from hybridtrain.errors import UserError
from hybridtrain.lightning_package import PACKAGES, for_new_code
from hybridtrain.util.arguments import command
from hybridtrain.util.option_types import shown

TEMPLATES, SUFFIX = Path(__file__).parents[1] / "new_project", ".template"
NEXT = """
Go on with
  cd {folder}
  python -m hybridtrain --config-dir conf task={name} trainer.devices=2
  python -m hybridtrain --config-dir conf -m task={name} strategy=hybrid,async trainer.devices=2
  pip install pytest && python -m pytest"""


def project_name(folder: Path) -> str:
    """The name of the package; raises UserError if the folder's makes none that is free."""
    name = re.sub(r"[-. ]+", "_", folder.name.lower())
    if not re.fullmatch(r"[a-z]([a-z0-9_]*[a-z0-9])?", name) or keyword.iskeyword(name):
        raise UserError(
            f"{shown(folder.name)} makes no name of a Python package; let the last part of DIR "
            "begin with a letter, have letters, digits, '-' and '_' only, and be no keyword"
        )
    spec = PathFinder.find_spec(name, [x for x in sys.path if x and Path(x) != Path.cwd()])
    taken = {"hybridtrain", *PACKAGES, *sys.stdlib_module_names}  # wherever this is called
    if name in taken or (spec is not None and spec.origin is not None):
        raise UserError(f"there is a package {name!r} already; choose another name for DIR")
    if name in ("conf", "tests", *groups()["task"]):
        raise UserError(f"{name!r} is a task or folder already; choose another name for DIR")
    return name


def filled_in(name: str) -> dict[str, str]:
    """The text of each file, by its path in the project."""
    lightning = for_new_code()
    values = {"name": name, "lightning": lightning, "requires": lightning.replace("_", "-")}
    return {
        str(path.relative_to(TEMPLATES)).removesuffix(SUFFIX).replace("PACKAGE", name): Template(
            path.read_text(encoding="utf-8")
        ).substitute(values)
        for path in sorted(TEMPLATES.rglob(f"*{SUFFIX}"))
    }


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write all files, or raise UserError and leave everything as it was."""
    try:
        if folder.exists() and any(folder.iterdir()):
            raise UserError(f"{folder} is not empty; choose another DIR")
        whole = folder.absolute()
        missing = [each for each in (*reversed(whole.parents), whole) if not each.exists()]
        try:
            for path, text in files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
        except BaseException:  # Ctrl-C, too
            for each in missing[:1] or folder.iterdir():
                shutil.rmtree(each) if each.is_dir() else each.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error.strerror}") from None


def run(arguments: Sequence[str]) -> None:
    """Make the project; print its files and the commands to go on with."""
    if len(arguments) != 1 or not arguments[0] or arguments[0].startswith("-"):
        given = " ".join(map(repr, arguments)) or "nothing"
        raise UserError(f"{given} was given; write python -m hybridtrain new DIR")
    folder = Path(arguments[0])
    name = project_name(folder.resolve())
    files = filled_in(name)
    write(folder, files)
    print("\n".join([f"{folder}: the project {name!r}", *(f"  {path}" for path in files)]))
    print(NEXT.format(folder=shlex.quote(str(folder)), name=name))


def main(arguments: Sequence[str]) -> int:
    """The command line behind ``new``: 0, or 2 after one line on standard error."""
    return command(run, __doc__, arguments)
