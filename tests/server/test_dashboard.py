"""The Grafana dashboard and the alerts ask for nothing that the server does not export."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from rm_server import ScoringService, ServerSettings

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "betterthan.json"
RULES = DEPLOY / "prometheus" / "rules.yml"
OF_PROMETHEUS = {"job", "instance", "le"}


def exported() -> dict[str, set[str]]:
    """Every name that a query can use, with its labels."""
    names: dict[str, set[str]] = {}
    registry = ScoringService(ServerSettings(checkpoint="x")).metrics.registry
    for collector in registry._collector_to_names:
        labels = {*getattr(collector, "_labelnames", ()), *OF_PROMETHEUS}
        for family in collector.collect():
            endings = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}.get(family.type, ("",))
            names |= {family.name + ending: labels for ending in endings}
    return names


def queries(dashboard: dict[str, Any]) -> list[str]:
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return asked + [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]


def alerts() -> list[str]:
    """Expressions of the alerts about metrics of the server; ``up`` is Prometheus' own."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    asked = [rule["expr"] for group in groups for rule in group["rules"]]
    return [query for query in asked if not query.startswith("up{")]


def test_every_query_names_metrics_and_labels_that_exist() -> None:
    known, asked = exported(), queries(json.loads(DASHBOARD.read_text(encoding="utf-8")))
    assert len(asked) > 30
    assert len(alerts()) >= 7
    for query in asked + alerts():
        names = re.findall(r"\b((?:rm|process)_[a-z0-9_]+)", query)
        assert names, query
        assert set(names) <= known.keys(), query
        labels = set(re.findall(r'([a-z_]+)\s*=~?\s*"', query))
        for grouped in re.findall(r"by \(([^)]*)\)", query):
            labels |= {label.strip() for label in grouped.split(",")}
        for name in names:
            assert labels <= known[name], (query, labels - known[name])
        for opening, closing in ("()", "{}", "[]"):
            assert query.count(opening) == query.count(closing), query


def test_every_metric_is_on_the_dashboard() -> None:
    text = DASHBOARD.read_text(encoding="utf-8")
    for metric in ScoringService(ServerSettings(checkpoint="x")).metrics.registry.collect():
        assert f"{metric.name}" in text, metric.name


def test_legends_name_labels_of_their_query() -> None:
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert re.search(rf"by \([^)]*\b{label}\b", target["expr"]), target


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
