"""The arguments that callbacks hand on are those of the monitor."""

from __future__ import annotations

import inspect

import gramscope as gs
from gramscope.integrations.watch import MonitorOptions


def test_every_option_is_an_argument_of_the_monitor() -> None:
    given = [inspect.signature(function).parameters for function in (gs.Monitor, gs.measure, gs.collect)]
    assert set(MonitorOptions.__annotations__) <= set().union(*given)
