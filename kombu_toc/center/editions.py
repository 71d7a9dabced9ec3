"""Which edition of a source's schedules is in force: so that releases side by side do not fight."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigurationError
from ..model.keys import Keys
from ..model.results import Edition
from ..scripts.call import ScriptCall, load, text
from .runner import Runner

#: Seconds for which an edition must be unused before a former one may come back.
UNUSED = 600.0

#: Seconds for which a process may put an edition before it says that it goes on.
PUTTING = 30.0

#: Characters of an app's name, or a release.
LONGEST = 200


class Editions:
    """The editions of sources. A source is an app that puts schedules, an edition all that one
    release of it has to put."""

    def __init__(self, runner: Runner, keys: Keys) -> None:
        self._runner = runner
        self._keys = keys

    def edition(
        self,
        source: str,
        edition: str,
        process: str,
        *,
        what: str = "use",
        release: str = "",
        looked: float = 0.0,
        unused: float = UNUSED,
    ) -> Edition:
        """Say that a process has this edition, and ask what is to be done.

        source: an app's name
        edition: a text that two equal editions share
        process: a name that no other process has
        what: ``use`` asks. ``force`` asks for an edition that is to be put whatever is in force.
            ``renew`` goes on with putting, for another half a minute. ``done`` ends it; it all is
            to be put once more if the verdict is ``put``
        release: of a later release the edition goes before one of an earlier, whoever comes first;
            numbers in it count as numbers. Of one release, the edition that came last is in force
        looked: seconds for which the process has asked
        unused: seconds. If an edition is in force that nobody has used for so long, and the process
            has asked for so long, an earlier edition comes back

        Raises ConfigurationError for a source or a release that is too long or no text.
        """
        for kind, name in (("the name of an app", source), ("a release", release)):
            if not isinstance(name, str) or len(name) > LONGEST:
                raise ConfigurationError(
                    f"{kind} is a text of at most {LONGEST} characters, unlike {name!r:.60}"
                )

        def parse(reply: list[Any]) -> Edition:
            verdict, generation, in_force, its, by, since, busy = reply
            names = (text(in_force), text(its), text(by))
            return Edition(text(verdict), int(generation), *names, since / 1000, busy / 1000)

        keys = (self._keys.edition(source), self._keys.editions(source))
        milliseconds = (int(seconds * 1000) for seconds in (looked, unused, PUTTING))
        arguments = (what, edition, release, process, *milliseconds)
        answer: Edition = self._runner.run(ScriptCall(load("edition"), keys, arguments, parse))
        return answer
