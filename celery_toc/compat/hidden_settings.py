"""The databases of the task library are not shown among an app's settings.

Touches: ``celery.app.utils.HIDDEN_SETTINGS``.

Why: ``celery report``, ``celery inspect report`` and ``celery inspect conf`` show all settings, but
for those whose names match this expression. The URL of a database is in
``broker_transport_options``, and may have a password.

Read in Celery 5.3.6, 5.5.3 and 5.7.0.

Without: these commands show ``toc_library`` as it was set. ``env:NAME`` shows no password.
"""

from __future__ import annotations

import re

from kombu_toc import CompatPart

#: What matches the option, and not those whose names it begins.
_OPTION = r"\bTOC_LIBRARY$"

PART = CompatPart(
    "hidden-settings",
    touches="Celery's HIDDEN_SETTINGS",
    lost="`celery report` and `celery inspect conf` show the URLs of toc_library with passwords",
    check=lambda utils: (
        []
        if isinstance(getattr(utils, "HIDDEN_SETTINGS", None), re.Pattern)
        else ["celery.app.utils.HIDDEN_SETTINGS"]
    ),
)


def install() -> None:
    """Have Celery hide the option."""
    from celery.app import utils

    if PART.usable(utils) and _OPTION not in utils.HIDDEN_SETTINGS.pattern:
        shown = utils.HIDDEN_SETTINGS
        utils.HIDDEN_SETTINGS = re.compile(f"{shown.pattern}|{_OPTION}", shown.flags)
