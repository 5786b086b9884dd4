"""Every routine on extreme matrices: the value that exact arithmetic gives, or an error that names the argument."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from gramscope.errors import GramscopeError, InputError, NumericalError, RescueWarning, ResultWarning
from torture.exact import exact
from torture.matrices import CASES, ORDINARY, Case
from torture.routines import ROUTINES, TALL, WIDE, Routine

#: exponents of two beyond which functions may refuse their arguments, near 1e±70
BEYOND = 225
#: answers of the oracle: the same numbers come in several dtypes
KNOWN: dict[Any, dict[str, Any] | None] = {}


def arguments(routine: Routine, case: Case, which: str, sizes: dict[str, int]) -> dict[str, Tensor]:
    """The tensors of one call, of which ``which``, or all, are extreme; the others fit them."""
    given = {}
    for name, letters in routine.arguments.items():
        shape = (sizes[letters[0]], sizes[letters[1]])
        extreme = which in (name, "all") or case.kind == "one by one"
        given[name] = (case if extreme else ORDINARY).matrix(shape, name, square=letters[0] == letters[1] != "n")
    return given


def calls() -> Iterator[Any]:
    for name, routine in ROUTINES.items():
        several = len(routine.arguments) > 1
        for which in [*routine.arguments, *(["all"] if several else [])]:
            for shape in ("tall", "wide"):
                yield pytest.param(routine, which, TALL if shape == "tall" else WIDE, id=f"{name}-{which}-{shape}")


def check(got: Any, want: Any, bound: float, where: str, dtype: torch.dtype | None) -> None:
    """The value is within ``bound`` rounding units of the exact one, or of the size of its largest term."""
    value, size = want if isinstance(want, tuple) else (want, None)
    value = np.asarray(value, dtype=object)
    found = got.detach() if isinstance(got, Tensor) else torch.tensor(got, dtype=torch.float64)
    limits = torch.finfo(found.dtype if dtype is None else dtype)
    size = np.max(abs(value)) if size is None else size
    assert found.shape == value.shape, f"{where}: shape {tuple(found.shape)}"
    assert bool(found.isfinite().all()), f"{where} is {found.tolist()} for {value.tolist()}"
    error = np.max(abs(np.asarray(exact(found)) - value))
    allowed = bound * (limits.eps * size + limits.tiny * limits.eps)
    assert error <= allowed, (
        f"{where}: {found.tolist()} for {value.tolist()}: error {mpmath.nstr(error, 3)} > {mpmath.nstr(allowed, 3)}"
    )


def beyond(want: dict[str, Any]) -> bool:
    """Whether a part of the result exceeds what numbers can hold, in the dtype or on the way to it."""
    return any(
        np.max(abs(np.asarray(part))) > mpmath.mpf(2) ** 120
        for v in want.values()
        for part in (v if isinstance(v, tuple) else (v,))
    )


@pytest.mark.parametrize(("routine", "which", "sizes"), list(calls()))
def test_routine(routine: Routine, which: str, sizes: dict[str, int], record_property: Any) -> None:
    wrong = []
    for case in CASES:
        try:
            check_case(routine, arguments(routine, case, which, sizes), case)
        except Exception as error:
            wrong.append(f"{case.name}: {type(error).__name__}: {error}")
    record_property("torture", f"{len(CASES)}|{len(wrong)}")
    assert wrong == []


def expected(routine: Routine, given: dict[str, Tensor]) -> dict[str, Any] | None:
    """What the oracle says; None where it divides by zero."""
    key = (
        id(routine),
        *(tuple(x.shape) for x in given.values()),
        *(tuple(x.double().flatten().tolist()) for x in given.values()),
    )
    if key not in KNOWN:
        try:
            KNOWN[key] = routine.oracle(**{name: exact(x) for name, x in given.items()})
        except ZeroDivisionError:
            KNOWN[key] = None
    return KNOWN[key]


def check_case(routine: Routine, given: dict[str, Tensor], case: Case) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found, error = routine.call(**given), None
        except GramscopeError as raised:
            found, error = {}, raised
    assert all(issubclass(w.category, RescueWarning | ResultWarning) for w in caught), [str(w.message) for w in caught]
    if case.refused:
        if error is None:
            assert all(x.numel() == 0 for x in found.values())
        else:
            assert isinstance(error, InputError | NumericalError)
            assert any(word in str(error) for word in (*given, "matrix", "matrices"))
        return
    want = expected(routine, given)
    if want is None or case.exponent < routine.least:
        return  # zero over zero: NaN where the documentation says so, or an error
    if isinstance(error, NumericalError) and (beyond(want) or abs(case.exponent) > BEYOND):
        return
    if isinstance(error, InputError) and "Y" in given and bool((given["Y"] == given["Y"][0]).all()):
        assert "Y is constant" in str(error)
        return
    if error is not None:
        raise error
    if any(issubclass(w.category, RescueWarning) for w in caught):
        return
    for name, value in want.items():
        check(
            found[name], value, routine.bound, name or "the result", given[routine.unit].dtype if routine.unit else None
        )
