"""The pages of docs/: every program in them runs as the page says and checks itself by its own assertions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
# A program whose first line is `# torchrun --nproc-per-node N` runs as N processes, any other in one.
PROGRAMS = {
    f"{page.name}:{number}": program
    for page in sorted(DOCS.glob("*.md"))
    for number, program in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE))
}
NEEDS = {"transformers.md": "transformers"}  # page: the optional package its programs import


@pytest.mark.parametrize("name", PROGRAMS)
def test_program_runs(name: str, tmp_path: Path) -> None:
    needed = NEEDS.get(name.partition(":")[0])
    if needed:
        pytest.importorskip(needed)
    # Without it, threads of gloo may meet the interpreter's end, which aborts the process now and then.
    assert "init_process_group" not in PROGRAMS[name] or PROGRAMS[name].endswith("\ndist.destroy_process_group()\n")
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[name])
    ranks = re.match(r"# torchrun --nproc-per-node (\d+)\n", PROGRAMS[name])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks[1]] if ranks else []
    run = subprocess.run(
        [sys.executable, *launcher, str(program)], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_readme_links_every_page() -> None:
    readme = (DOCS.parent / "README.md").read_text()
    for page in DOCS.glob("*.md"):
        assert f"docs/{page.name}" in readme, f"README.md does not mention docs/{page.name}"
