"""The command line on another host than the first of a run: it writes nothing and says one line.

Host 0 keeps the run's directory. All others write into a temporary one, which is removed at the
end, whatever directory they were given: the same one on a shared file system is claimed already.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from omegaconf import DictConfig, open_dict, read_write

from hybridtrain.cli.explain import STRATEGY
from hybridtrain.util.cleanup import vanishing_directory
from hybridtrain.util.host_place import HostPlace, place_by_variables

_temporary = ExitStack()


def number_of_hosts(configuration: Mapping[str, Any] | DictConfig) -> int:
    """As configured; 1 for strategies of Lightning's own, whose ranks keep to its own ways."""
    given = (configuration.get("trainer") or {}).get("num_nodes")
    ours = (configuration.get("strategy") or {}).get("_target_") == STRATEGY
    return given if ours and type(given) is int and given > 1 else 1  # checked later


def place_in(configuration: Mapping[str, Any] | DictConfig) -> HostPlace:
    """This process' place among the hosts of a run with this configuration.

    Raises:
        UserError: if the engine that started it does not agree with the configuration.
    """
    return place_by_variables(number_of_hosts(configuration))


def diverted(config: DictConfig) -> bool:
    """On another host than the first: let the run write into a temporary directory.

    Args:
        config: with Hydra's own node, before Hydra makes the directory.

    Raises:
        UserError: see :func:`place_in`.
    """
    if place_in(config).host == 0:
        return False
    folder = _temporary.enter_context(vanishing_directory("hybridtrain-host-"))
    with read_write(config), open_dict(config):
        config.hydra.run.dir = str(folder)
        config.hydra.output_subdir = None
    return True


def remove_temporary() -> None:
    """Remove what this process was diverted to."""
    _temporary.close()


@contextmanager
def quiet(place: HostPlace) -> Iterator[None]:
    """On another host than the first: show errors alone."""
    if place.host == 0:
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
