"""Counts of yes and no by number: which of many were seen, and how often."""

from __future__ import annotations

import numpy as np

from recompute_scan.trace.columns import Bool, Int64


class Tally:
    """How often each of some keys came with yes, and how often with no.

    Args:
        keys: Numbers, each as often as it came.
        yes: What came with it.
    """

    def __init__(self, keys: Int64, yes: Bool) -> None:
        known, at = np.unique(keys, return_inverse=True)
        # One more, that no key is at, for those that never came.
        self._keys = np.append(known, -1)
        self._yes = np.bincount(at[yes], minlength=len(self._keys))
        self._no = np.bincount(at[~yes], minlength=len(self._keys))

    def __getitem__(self, keys: Int64) -> tuple[Int64, Int64]:
        """How often each of these came with yes, and with no."""
        at = np.searchsorted(self._keys[:-1], keys)
        at[self._keys[at] != keys] = len(self._keys) - 1
        return self._yes[at], self._no[at]
