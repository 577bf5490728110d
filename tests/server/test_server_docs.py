"""What is committed about the server says what it does. To write it anew: ``python tests/server/test_server_docs.py``."""

import json
import re
from pathlib import Path

from rm_server import ScoringService, ServerSettings, create_app
from rm_server import errors as errors_module
from rm_server.errors import ServerError
from rm_server.settings import env_of, flag_of

DOCS = Path(__file__).resolve().parents[2] / "docs"
OPENAPI, SERVING = DOCS / "openapi.json", DOCS / "serving.md"
BEGIN, END = "<!-- settings: generated -->", "<!-- end of settings -->"


def openapi_text() -> str:
    service = ScoringService(ServerSettings(checkpoint="x"))
    return json.dumps(create_app(service, service.settings).openapi(), indent=2, ensure_ascii=False) + "\n"


def settings_table() -> str:
    from rm_core.config_docs import markdown_reference

    table = markdown_reference(
        ServerSettings, extra={"flag": lambda s: f"`{flag_of(s.key)}`", "environment": lambda s: f"`{env_of(s.key)}`"}
    )
    return table.replace("`--checkpoint`", "the argument")


def test_committed_openapi_is_the_served_one() -> None:
    assert OPENAPI.read_text(encoding="utf-8") == openapi_text()


def test_settings_in_the_docs_are_the_declared_ones() -> None:
    text = SERVING.read_text(encoding="utf-8")
    assert text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip() == settings_table().strip()


def test_every_metric_is_in_the_docs() -> None:
    service = ScoringService(ServerSettings(checkpoint="x"))
    served = {metric.name for metric in service.metrics.registry.collect()}
    documented = set(re.findall(r"`((?:rm|process)_[a-z_]+?)(?:_total)?[`{]", SERVING.read_text(encoding="utf-8")))
    assert served == documented - {"rm_server", "rm_client", "rm_core", "rm_train"}


def test_every_error_is_in_the_tree_and_in_the_docs() -> None:
    text = SERVING.read_text(encoding="utf-8")
    classes = [cls for cls in vars(errors_module).values() if isinstance(cls, type) and issubclass(cls, ServerError)]
    assert len(classes) > 15
    for cls in classes:
        assert cls.__name__ in (errors_module.__doc__ or "")
        if cls.type not in ("internal",):
            row = next(line for line in text.splitlines() if line.startswith("|") and f"`{cls.type}`" in line)
            assert str(cls.status) in row or cls.__subclasses__() or cls.status in (400, 405), row


if __name__ == "__main__":
    OPENAPI.write_text(openapi_text(), encoding="utf-8")
    serving = SERVING.read_text(encoding="utf-8")
    before, after = serving[: serving.index(BEGIN) + len(BEGIN)], serving[serving.index(END) :]
    SERVING.write_text(f"{before}\n{settings_table()}\n{after}", encoding="utf-8")
