"""The fixtures of tests with workers."""

from ..support.library import engine as engine
from ..support.library import library_url as library_url
from ..support.library import new_url as new_url
from ..support.workers import *  # noqa: F403 - pytest finds them here
