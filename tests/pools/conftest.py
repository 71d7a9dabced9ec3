"""The fixtures of tests with workers."""

from ..support.workers import *  # noqa: F403 - pytest finds them here
