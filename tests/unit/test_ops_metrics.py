"""Every metric and label in the alerts, the dashboard and the documents is one that is served."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client.core import Metric

from batchjobs.metrics import Exporter
from batchjobs.settings import Settings
from tests.support.ops_files import DOCUMENTS, OPS, ROOT, documents


class _Loop:
    """As much of an engine's loop as a worker's metrics read."""

    is_paused = False
    model_name, model_version, dtype, device = "tiny", "sha256:1", "float32", "cpu"

    @property
    def engine(self) -> _Loop:
        return self

    def stats(self) -> Any:
        from workers.engine.requests import EngineStats

        return EngineStats(
            running=0, waiting=0, kv_usage_ratio=0.0, prompt_tokens=0, generated_tokens=0, preemptions=0, steps=0
        )


def _names(family: Metric) -> list[str]:
    endings = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "info": ["_info"]}
    return [family.name + ending for ending in endings.get(family.type, [""])]


@pytest.fixture(scope="module")
def metrics(migrated_sqlite_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Metric]:
    """Every metric that is served, by the name that Prometheus knows it by."""
    from workers.metrics import WorkerMetrics

    home = tmp_path_factory.mktemp("home")
    file = shutil.copy(migrated_sqlite_file, home / "batchjobs.sqlite3")
    exporter = Exporter(Settings(home=home, database_url=f"sqlite:///{file}"))
    try:
        families = [*exporter.registry.collect(), *WorkerMetrics(_Loop()).registry.collect()]  # type: ignore[arg-type]
    finally:
        exporter.close()
    return {name: family for family in families for name in _names(family)}


RULES = [rule for group in documents(OPS / "prometheus/alerts.yml")[0]["groups"] for rule in group["rules"]]
DASHBOARD = json.loads((OPS / "grafana/dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [
    *((rule["alert"], rule["expr"]) for rule in RULES),
    *((panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]),
]
_SELECTOR = r"\b(batchjobs_[a-z0-9_]+)(?:\{([^}]*)\})?"
_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"([^"]*)"')


def _grows(family: Metric) -> bool:
    return family.type in ("counter", "histogram")


@pytest.mark.parametrize(("title", "query"), QUERIES, ids=[title for title, _ in QUERIES])
class TestQueries:
    def test_every_metric_and_label_exists(self, title: str, query: str, metrics: dict[str, Metric]) -> None:
        found = re.findall(_SELECTOR, query)
        assert found or "up{" in query
        for name, matchers in found:
            assert name in metrics, name
            family = metrics[name]
            assert re.sub(_MATCHER, "", matchers).strip(", ") == "", matchers
            for label, _, value in _MATCHER.findall(matchers):
                if label == "instance":
                    assert value == "$instance"
                    continue
                known = {sample.labels[label] for sample in family.samples if label in sample.labels}
                assert set(value.split("|")) <= known or {name, label} == {"batchjobs_up", "service"}, (name, label)

    def test_it_is_promql(self, title: str, query: str) -> None:
        promql_parser.parse(query.replace("$__rate_interval", "5m"))  # Grafana fills that in

    def test_rates_are_of_counters_alone(self, title: str, query: str, metrics: dict[str, Metric]) -> None:
        over_time = re.findall(rf"\b(rate|increase|deriv)\({_SELECTOR}\[(?:\d+m|\$__rate_interval)\]\)", query)
        assert len(over_time) == len(re.findall(r"\[", re.sub(r'"[^"]*"', "", query)))
        for function, name, _ in over_time:
            assert _grows(metrics[name]) == (function != "deriv"), query
        counters = [name for name, _ in re.findall(_SELECTOR, query) if _grows(metrics[name])]
        assert len(counters) == sum(function != "deriv" for function, _, _ in over_time), (
            "a total by itself says nothing"
        )


def test_documents_name_metrics_that_exist(metrics: dict[str, Metric]) -> None:
    families = {*metrics, *(name.removesuffix("_bucket") for name in metrics)}
    named = set()
    for file in [*DOCUMENTS, *sorted((ROOT / "docs").glob("*.md"))]:
        text = file.read_text()
        queries = "".join(re.findall(r"```promql\n(.*?)```", text, re.DOTALL))
        for name in re.findall(r"`(batchjobs_[a-z0-9_]+)", text) + [name for name, _ in re.findall(_SELECTOR, queries)]:
            assert name in families, (file.name, name)
            named.add(name)
    assert len(named) > 20


def test_alerts_say_what_is_wrong_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES) > 10
    for rule in RULES:
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}, rule["alert"]
        assert (ROOT / rule["annotations"]["runbook"]).is_file()
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert re.fullmatch(r"\d+m", rule.get("for", "0m"))


def test_the_dashboard_is_clean() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS) > 20
    taken: set[tuple[int, int]] = set()
    for panel in PANELS:
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}
