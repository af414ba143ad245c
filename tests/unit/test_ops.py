"""The files for operators are well-formed, name only what exists, and hold no password: all of `ops/`, and what runs in
containers."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from yamllint import linter
from yamllint.config import YamlLintConfig

from batchjobs.redis_binary import find_server
from batchjobs.settings import Settings
from tests.support.ops_files import DOCUMENTS, KUBERNETES, OPS, OWN, ROOT, SERVICES, TEXTS, documents, relative
from tests.support.waiting import eventually

YAML_FILES = sorted(file for file in OPS.rglob("*") if file.suffix in (".yaml", ".yml"))
NOT_SETTINGS = {"BATCHJOBS_CACHE"}


@pytest.mark.parametrize("file", YAML_FILES, ids=relative)
def test_yaml_is_clean(file: Path) -> None:
    problems = linter.run(file.read_text(), YamlLintConfig(file=str(OPS / ".yamllint")), str(file))
    assert [str(problem) for problem in problems] == []
    assert all(document is not None for document in documents(file))


def test_no_file_has_a_password() -> None:
    for file in TEXTS:
        for password in re.findall(r"://[^\s/@]*:([^\s@]+)@", file.read_text()):
            assert password == "REPLACE_ME" or password.startswith("${"), (relative(file), password)
        for name, value in re.findall(r"^\s*(\w*(?:PASSWORD|_AUTH))\s*[=:] *(\S.*)$", file.read_text(), re.MULTILINE):
            assert value == "REPLACE_ME" or re.fullmatch(r"\$\{\w+:\?[^}]*\}", value), (relative(file), name)


def test_every_setting_named_exists() -> None:
    known = {f"BATCHJOBS_{name.upper()}" for name in Settings.model_fields} | NOT_SETTINGS
    named = {(relative(file), name) for file in TEXTS for name in re.findall(r"\bBATCHJOBS_[A-Z_]+", file.read_text())}
    assert len(named) > 20
    assert {(file, name) for file, name in named if name not in known} == set()


def test_every_path_named_exists() -> None:
    for file in TEXTS:
        for path in re.findall(r"(?<![\w/.])(?:ops|docs)/[\w./@*-]*[\w*]", file.read_text()):
            assert path == "ops/compose.env" or list(ROOT.glob(path)), (relative(file), path)
    for file in DOCUMENTS:
        for link in re.findall(r"\]\(([^)#:]+)\)", file.read_text()):
            assert (file.parent / link).exists(), (relative(file), link)


class TestDockerfile:
    text = (OPS / "Dockerfile").read_text()

    def test_copies_what_is_there_and_is_not_ignored(self) -> None:
        sources = [word for line in re.findall(r"^COPY (.*)$", self.text, re.M) for word in line.split()[:-1]]
        ignored = (OPS / "Dockerfile.dockerignore").read_text().split()
        assert {"pyproject.toml", "batchjobs", "workers", "migrations", "constraints.txt"} <= set(sources)
        for source in sources:
            assert (ROOT / source).exists(), source
            assert f"!{source}" in ignored

    def test_does_not_run_as_root_and_says_whether_it_is_well(self) -> None:
        assert re.findall(r"^USER (.*)$", self.text, re.M)[-1] == "10001:10001"
        assert "HEALTHCHECK" in self.text
        assert 'ENTRYPOINT ["batchjobs"]' in self.text


class TestCompose:
    def test_every_service_comes_from_a_version_that_is_pinned(self) -> None:
        for name, service in SERVICES.items():
            assert re.search(r":v?\d+\.\d+[\w.-]*$", service["image"]), name
        assert set(OWN) == {"migrate", "worker", "exporter"}

    def test_every_service_is_watched(self) -> None:
        for name, service in SERVICES.items():
            assert "healthcheck" in service or name in OWN, name  # the image has one

    def test_services_wait_for_what_they_need(self) -> None:
        for name, service in SERVICES.items():
            for other, how in service.get("depends_on", {}).items():
                assert other in SERVICES, name
                ends = how["condition"] == "service_completed_successfully"
                assert ends == (other == "migrate")
                assert ends or "healthcheck" in SERVICES[other]

    def test_volumes_and_files_exist(self) -> None:
        volumes = documents(OPS / "compose.yaml")[0]["volumes"]
        used = set()
        for service in SERVICES.values():
            for volume in service.get("volumes", []):
                source = re.sub(r"\$\{\w+:-(\w+)\}", r"\1", volume).split(":")[0]
                if source.startswith("."):
                    assert (OPS / source).exists(), source
                else:
                    used.add(source)
        assert used == set(volumes)

    def test_only_dashboards_are_open_and_only_to_this_machine(self) -> None:
        ports = {name: service["ports"] for name, service in SERVICES.items() if "ports" in service}
        assert set(ports) == {"prometheus", "grafana"}
        assert all(port.startswith("127.0.0.1:") for each in ports.values() for port in each)

    def test_the_example_of_the_environment_names_every_variable(self) -> None:
        example = (OPS / "compose.env.example").read_text()
        there = set(re.findall(r"^#?([A-Z_]+)=", example, re.M))
        text = (OPS / "compose.yaml").read_text() + (OPS / "compose.gpu.yaml").read_text()
        assert set(re.findall(r"(?<!\$)\$\{(\w+)", text)) == there
        assert set(re.findall(r"\$\{(\w+):\?", text)) == set(re.findall(r"^(\w+)=$", example, re.M))

    def test_prometheus_asks_where_metrics_are_served(self) -> None:
        jobs = {job["job_name"]: job for job in documents(OPS / "prometheus/prometheus.yml")[0]["scrape_configs"]}
        assert jobs["batchjobs-exporter"]["static_configs"] == [{"targets": ["exporter:9410"]}]
        assert SERVICES["exporter"]["command"][-2:] == ["--port", "9410"]
        (names,) = jobs["batchjobs-worker"]["dns_sd_configs"]
        worker = SERVICES["worker"]
        assert names["names"] == worker["networks"]["default"]["aliases"]
        assert str(names["port"]) == worker["environment"]["BATCHJOBS_METRICS_PORT"]
        assert (OPS / "prometheus/alerts.yml").exists()

    def test_the_gpu_file_changes_services_that_exist(self) -> None:
        (changes,) = documents(OPS / "compose.gpu.yaml")
        assert set(changes["services"]) <= set(SERVICES)


def _redis_scripts() -> list[str]:
    in_compose = SERVICES["redis"]["command"][0].replace("$$", "$").replace("docker-entrypoint.sh ", "")
    _, stateful_set = documents(KUBERNETES / "trial/redis.yaml")
    return [in_compose, stateful_set["spec"]["template"]["spec"]["containers"][0]["args"][0]]


@pytest.mark.parametrize("script", _redis_scripts(), ids=["compose", "kubernetes"])
def test_redis_starts_with_these_settings(script: str, tmp_path: Path) -> None:
    server = find_server()
    script = script.replace("redis-server", str(server)).replace("dir /data", f"dir {tmp_path}\nport 0\nunixsocket r")
    # Redis 6 knows the setting under its old name.
    script = script.replace("listpack-value", "ziplist-value")
    variables = {"REDIS_PASSWORD": "word", "REDISCLI_AUTH": "word", "REDIS_MAXMEMORY": "512mb"}
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(["sh", "-c", script], cwd=tmp_path, env=variables, stdout=log, stderr=log)
    try:
        eventually((tmp_path / "r").exists, "Redis listens")
        with redis.Redis(unix_socket_path=str(tmp_path / "r"), password="word", decode_responses=True) as client:
            found = {key: value for name in ("append*", "maxmemory*") for key, value in client.config_get(name).items()}
        assert (found["appendonly"], found["appendfsync"]) == ("yes", "everysec")
        assert (found["maxmemory"], found["maxmemory-policy"]) == (str(512 << 20), "noeviction")
        with (
            redis.Redis(unix_socket_path=str(tmp_path / "r"), retry=Retry(NoBackoff(), 0)) as stranger,
            pytest.raises(redis.AuthenticationError),
        ):
            stranger.ping()
        assert b"word" not in Path(f"/proc/{process.pid}/cmdline").read_bytes()
    finally:
        process.terminate()
        process.wait(timeout=20)
