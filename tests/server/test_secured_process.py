"""The command with keys, TLS, JSON log and audit log, as a process."""

import json
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import trustme

from rm_server.auth import hash_key
from tests.server.test_server_process import ENVIRONMENT, server

KEY, CANARY = "rm-process-canary-key", "canary-text"


@pytest.mark.slow
def test_process_with_keys_tls_json_log_and_audit_log(tiny_checkpoint: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    certificate, keys, audit = tmp_path / "server.pem", tmp_path / "keys.txt", tmp_path / "audit.jsonl"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(certificate))
    keys.write_text(f"{hash_key(KEY)} trainer\n")
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    arguments = ["--ssl-certfile", str(certificate), "--api-keys-file", str(keys), "--audit-log", str(audit)]
    with (
        server(tiny_checkpoint, *arguments, "--access-log", "--log-format", "json") as (process, url),
        httpx.Client(base_url=url, verify=trust, timeout=60) as client,
    ):
        assert url.startswith("https://")
        body = {"prompt": CANARY, "completions": [CANARY, "b"]}
        assert client.post("/score", json=body).status_code == 401
        answer = client.post(f"/score?x={CANARY}", json=body, headers={"X-API-Key": KEY, "X-Request-ID": "step-1"})
        assert answer.status_code == 200
        assert client.post("/score", content=CANARY, headers={"X-API-Key": KEY}).status_code == 400
        assert client.post("/admin/sleep", headers={"X-API-Key": KEY}).status_code == 403
        assert httpx.get(f"{url}/health", verify=trust).status_code == 200
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 0
    lines = [json.loads(line) for line in err.splitlines()]
    seen = [(line["route"], line["status"], line.get("key")) for line in lines if line["logger"] == "rm_server.access"]
    assert seen[:4] == [
        ("(none)", 401, None),
        ("/score", 200, "trainer"),
        ("/score", 400, "trainer"),
        ("(none)", 403, "trainer"),
    ]
    assert next(line["request_id"] for line in lines if line.get("status") == 200) == "step-1"
    records = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [record["reward"] for record in records] == answer.json()["rewards"]
    assert {record["request_id"] for record in records} == {"step-1"}
    for text in (err, audit.read_text()):
        assert CANARY not in text
        assert KEY not in text


def test_key_file_certificate_or_audit_log_that_cannot_be_used_is_one_line_and_exit_2(tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text(f"{CANARY}\n")
    for arguments, says in [
        (["--api-keys-file", str(plain)], "plain.txt:1: must be sha256:HEX NAME"),
        (["--ssl-certfile", str(plain)], "plain.txt: is not the unencrypted PEM key"),
        (["--audit-log", str(plain / "audit.jsonl")], "audit_log: "),
    ]:
        result = subprocess.run(
            [sys.executable, "-m", "rm_server.cli", "checkpoint", "--port", "0", *arguments],
            capture_output=True,
            text=True,
            env=ENVIRONMENT,
            timeout=120,
        )
        assert result.returncode == 2, result.stderr
        assert says in result.stderr
        assert result.stderr.count("\n") == 1, result.stderr
        assert CANARY not in result.stderr
