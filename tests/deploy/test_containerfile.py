"""Container files in deploy: hadolint has no complaints, and their user, health check and contents are right."""

from pathlib import Path

import pytest

from tests.clients.environments import run_tool
from tests.deploy.containerfile import FILE, MODEL, ROOT, USER, stages


@pytest.mark.processes
@pytest.mark.parametrize("path", [FILE, MODEL], ids=lambda path: str(path.name))
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    judged = run_tool("deploy", "hadolint", "--no-color", str(path))
    assert (judged.returncode, judged.stdout + judged.stderr) == (0, "")


def test_an_image_has_a_user_by_number_a_health_check_and_no_tools_of_its_build() -> None:
    build, result = stages()
    assert result.of("USER") == [f"{USER}:{USER}"]
    assert result.words("ENTRYPOINT") == ["headway"]
    assert result.words("HEALTHCHECK") == ["headway", "status"]
    assert result.of("COPY") == ["--from=build /opt/headway /opt/headway"]
    for text in build.of("RUN"):
        assert "pip install" not in text or "--require-hashes" in text or "--no-index" in text
    assert "PIP_NO_CACHE_DIR" in build.environment


def test_what_an_image_is_built_from_is_all_that_goes_to_the_engine() -> None:
    [docker, container] = ((ROOT / name).read_text() for name in (".dockerignore", ".containerignore"))
    assert docker == container
    everything, *lines = [line for line in docker.splitlines() if not line.startswith("#")]
    assert everything == "*"
    sources = {word for text in stages()[0].of("COPY") for word in text.split()[:-1]}
    assert {line[1:] for line in lines if line.startswith("!")} == sources
    assert all((ROOT / source).exists() for source in sources)
