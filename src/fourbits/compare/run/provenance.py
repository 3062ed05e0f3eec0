"""compare.json: the command, and how each run executed, which decides whether speeds are comparable."""

from dataclasses import asdict, dataclass
from typing import Any

from fourbits.compare.run.jobs import Jobs
from fourbits.compare.run.run_matrix import RunMatrix, RunSpec
from fourbits.data.whole_file import write_json
from fourbits.settings import build
from fourbits.train.run_folder import read_json

COMPARE_JSON = "compare.json"
# The first step traces and compiles; the median of fewer steps than this says nothing about speed.
MIN_STEPS_FOR_SPEED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """How a run executed, from its first step to its last. The fields are the keys in compare.json.

    session: identifies the `fourbits compare` process; jobs, threads: runs in parallel and CPU threads per
    run; together: the last step at which all `jobs` runs were executing. The last runs of a comparison have
    the machine to themselves, so their later steps are faster.
    """

    session: str
    jobs: int
    threads: int
    together: int

    @property
    def has_speed(self) -> bool:
        """Whether enough steps executed under full load to measure a speed."""
        return self.together >= MIN_STEPS_FOR_SPEED

    def comparable(self, other: "Provenance | None") -> bool:
        """Whether the two runs executed under the same load, so that a speed ratio is meaningful."""
        if other is None or not (self.has_speed and other.has_speed):
            return False
        return (self.session, self.jobs, self.threads) == (other.session, other.jobs, other.threads)


class ProvenanceFile:
    """compare.json of a comparison that is executing. session: a string no other process uses."""

    def __init__(self, matrix: RunMatrix, jobs: Jobs, session: str, command: str) -> None:
        """Read what an earlier process wrote. command: the command line, stored in the file."""
        self.matrix, self.jobs, self.session, self.command = matrix, jobs, session, command
        self.by_key = read_provenance(matrix)

    def add(self, run: RunSpec, first_step: int | None, together: int) -> None:
        """Record a run and write the file.

        first_step: above that of the run if it resumed, None if it was finished.
        """
        if first_step is None:
            return
        if together - run.first_step < MIN_STEPS_FOR_SPEED:
            together = 0
        provenance = Provenance(
            session=self.session, jobs=self.jobs.parallel, threads=self.jobs.threads, together=together
        )
        # The steps of a resumed run executed in two sessions, so its speed belongs to neither.
        self.by_key[run.key] = provenance if first_step == run.first_step else None
        self.write()

    def write(self) -> None:
        """Write the file atomically."""
        content: dict[str, Any] = {
            "name": self.matrix.name,
            "baseline": self.matrix.baseline,
            "recipes": list(self.matrix.recipes),
            "seeds": list(self.matrix.seeds),
            "command": self.command,
            "runs": {key: each and asdict(each) for key, each in self.by_key.items()},
        }
        write_json(self.matrix.out / COMPARE_JSON, content)


def read_provenance(matrix: RunMatrix) -> dict[str, Provenance | None]:
    """The provenance of each run in compare.json, by the run's key; None for a run that was resumed."""
    path = matrix.out / COMPARE_JSON
    content = read_json(path) if path.is_file() else {}
    records = content.get("runs", content.get("made", {}))  # "made" in older files
    return {key: record and build(Provenance, record, f"{path}: {key}") for key, record in records.items()}
