"""Fingerprints of what one call gets and gives, each taken once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from recompute_scan.fidelity.elements import Part, part_of_memory
from recompute_scan.fidelity.fingerprint import Fingerprint, fingerprint_as_it_lies


class Keeping(Protocol):
    """A run, as far as a tape knows it."""

    @property
    def keeps(self) -> bool:
        """Whether later runs are compared with it."""


class Prints:
    """Fingerprints that are taken around one call, each once for all tapes.

    Their tensors are held until the call has been noted, so that how far they are from the
    forward's is worked out only where they are not the same.
    """

    def __init__(self, runs: Sequence[Keeping]) -> None:
        """Args: the runs under way, some of which may have to keep what other runs compare with."""
        self._keep = True in [run.keeps for run in runs]
        self._made: dict[int, Fingerprint | None] = {}
        self._parts: dict[int, Part] = {}

    def part(self, tensor: torch.Tensor) -> Part:
        """See :func:`recompute_scan.fidelity.elements.part_of_memory`."""
        known = self._parts.get(id(tensor))
        if known is None:
            known = self._parts[id(tensor)] = part_of_memory(tensor)
        return known

    def of(self, tensor: torch.Tensor, known: Fingerprint | None = None) -> Fingerprint | None:
        """The fingerprint of a tensor, which stays as it is until :meth:`let_go`.

        Args:
            tensor: Alive until then.
            known: Its fingerprint, where a tape has it.
        """
        key = id(tensor)
        if key in self._made:
            return self._made[key]
        if known is not None:
            print_: Fingerprint | None = known.held(tensor)
        else:
            print_ = fingerprint_as_it_lies(tensor, self.part(tensor).order)
        self._made[key] = print_
        return print_

    def let_go(self) -> None:
        """The call has been noted."""
        made = [print_ for print_ in self._made.values() if print_ is not None]
        try:
            for print_ in made:
                print_.let_go(keep=self._keep)
        except Exception:  # one that no kernel sums up
            for print_ in made:
                print_.let_go(keep=False)
            raise
