"""Stand-ins for programs that talk to a cluster: they write down their words and answer what a test says.

They show the contract alone (which words, in which order, what is done with the answers), not that a cluster would
take them.
"""

import json
import sys
from pathlib import Path

_BODY = """#!{python}
import json, sys
from pathlib import Path
folder = Path({folder!r})
with (folder / "{name}.calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
for words, code, out, err in json.loads((folder / "{name}.answers").read_text()):
    if all(word in sys.argv[1:] for word in words):
        sys.stdout.write(out)
        sys.stderr.write(err)
        sys.exit(code)
"""


class Fake:
    """A program on the PATH. Answers are looked through in order; without one it says nothing and exits 0."""

    def __init__(self, folder: Path, name: str, monkeypatch) -> None:
        self._folder, self._name, self._answers = folder / "fakes", name, []
        self._folder.mkdir(exist_ok=True)
        program = self._folder / name
        program.write_text(_BODY.format(python=sys.executable, folder=str(self._folder), name=name))
        program.chmod(0o755)
        self._write()
        monkeypatch.setenv("PATH", str(self._folder), prepend=":")

    def answer(self, *words: str, out: str = "", err: str = "", code: int = 0) -> None:
        """What it does when its arguments hold all these words; a newer answer goes before older ones."""
        self._answers.insert(0, (words, code, out, err))
        self._write()

    def _write(self) -> None:
        (self._folder / f"{self._name}.answers").write_text(json.dumps(self._answers))

    @property
    def calls(self) -> list[list[str]]:
        path = self._folder / f"{self._name}.calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
