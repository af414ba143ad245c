"""Whether a checkpoint holds what its model needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from batchjobs.errors import UsageError

log = logging.getLogger(__name__)


def check_weights(report: Mapping[str, Any], source: str) -> None:
    """Refuse what transformers would go on with, random numbers in the place of what it did not find or could not use.

    Raises:
        UsageError: A weight is missing, or has another shape than the configuration says.
    """
    if missing := sorted(report["missing_keys"]):
        raise UsageError(f"{source!r} is incomplete: {len(missing)} weights are missing, such as {missing[0]}")
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, wanted = mismatched[0]
        raise UsageError(
            f"cannot load the model {source!r}: {name} is {tuple(found)} in its weights, "
            f"but {tuple(wanted)} by its config.json"
        )
    if unused := sorted(report["unexpected_keys"]):
        log.warning("%s has %d weights that its architecture does not use, such as %s", source, len(unused), unused[0])
