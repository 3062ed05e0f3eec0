"""compare.json: what was asked, and how each run was made, which decides whether speeds may be compared."""

from dataclasses import asdict, dataclass
from typing import Any

from fourbits.compare.jobs import Jobs
from fourbits.compare.plan import Plan, PlannedRun
from fourbits.data.whole_file import write_json
from fourbits.settings import build
from fourbits.train.run_folder import read_json

RECORD = "compare.json"
# The median of fewer steps, of which the first is traced and compiled, is no speed.
ENOUGH_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """How a run was made from its first step to its end.

    session: the process that was in charge; jobs, threads: as in `Jobs`; together: the last step at which as
    many runs as `jobs` says were being made. The last runs of a comparison have the machine for themselves.
    """

    session: str
    jobs: int
    threads: int
    together: int

    @property
    def has_speed(self) -> bool:
        """Whether enough steps were made side by side to speak of a speed."""
        return self.together >= ENOUGH_STEPS

    def comparable(self, other: "Made | None") -> bool:
        """Whether a ratio of the two speeds says something about the runs."""
        if other is None or not (self.has_speed and other.has_speed):
            return False
        return (self.session, self.jobs, self.threads) == (other.session, other.jobs, other.threads)


class Ledger:
    """compare.json while a comparison goes on. session: any text that no other process uses."""

    def __init__(self, plan: Plan, jobs: Jobs, session: str, command: str) -> None:
        """Read what an earlier process wrote. command: what was typed."""
        self.plan, self.jobs, self.session, self.command = plan, jobs, session, command
        self.made = read_made(plan)

    def add(self, run: PlannedRun, first_step: int | None, together: int) -> None:
        """Note a run and write the file. first_step: None if it was there already, above 0 if continued."""
        if first_step is None:
            return
        whole = Made(
            session=self.session, jobs=self.jobs.at_a_time, threads=self.jobs.threads, together=together
        )
        # The speed of a run that was made in parts belongs to no session.
        self.made[run.key] = whole if first_step == 0 else None
        self.write()

    def write(self) -> None:
        """Write the file, whole or not at all."""
        content: dict[str, Any] = {
            "name": self.plan.name,
            "baseline": self.plan.baseline,
            "recipes": list(self.plan.recipes),
            "seeds": list(self.plan.seeds),
            "command": self.command,
            "made": {key: made and asdict(made) for key, made in self.made.items()},
        }
        write_json(self.plan.out / RECORD, content)


def read_made(plan: Plan) -> dict[str, Made | None]:
    """How each run in the folder of a plan was made, by its key; None for one that was made in parts."""
    path = plan.out / RECORD
    records = read_json(path).get("made", {}) if path.is_file() else {}
    return {key: record and build(Made, record, f"{path}: {key}") for key, record in records.items()}
