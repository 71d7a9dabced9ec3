"""How many files the process may have open: each connection is one."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

#: As many as a server for thousands needs.
WANTED = 65_536


def raise_file_limit() -> None:
    """Let as many connections be open as the system allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(hard, WANTED)
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError) as exc:
            logger.debug("the limit of open files stays %d: %s", soft, exc)
