"""The keys of the example federation: made once, renewed on demand, an authority that is never replaced."""

import runpy
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "flower" / "keys.py"
make = runpy.run_path(str(SCRIPT))["make"]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def is_signed(folder):
    authority, server = (x509.load_pem_x509_certificate((folder / f"{n}.crt").read_bytes()) for n in ("ca", "server"))
    server.verify_directly_issued_by(authority)
    ssl.create_default_context(cafile=folder / "ca.crt").load_cert_chain(folder / "server.crt", folder / "server.key")
    return authority.public_key() == load_pem_private_key((folder / "ca.key").read_bytes(), None).public_key()


def test_what_exists_is_kept_and_private(tmp_path):
    assert make(tmp_path, "127.0.0.1", ["site-0", "site-1"]) == ["ca", "server", "site-0", "site-1"]
    assert is_signed(tmp_path)
    for name in ("ca.key", "server.key", "site-0", "site-1"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    before = contents(tmp_path)
    assert make(tmp_path, "127.0.0.1", ["site-0", "site-1"]) == []
    assert contents(tmp_path) == before


def test_renewing_keeps_the_authority_and_the_others(tmp_path):
    make(tmp_path, "127.0.0.1", ["site-0", "site-1"])
    before = contents(tmp_path)
    assert make(tmp_path, "fl.example.org", [], ["server", "site-1"]) == ["server", "site-1"]
    after = contents(tmp_path)
    changed = {name for name, content in after.items() if before.get(name) != content and not name.endswith(".old")}
    assert changed == {"server.crt", "server.key", "site-1", "site-1.pub"}
    assert after["site-1.old"] == before["site-1"]
    assert is_signed(tmp_path)


def test_an_authority_is_not_replaced(tmp_path):
    make(tmp_path, "127.0.0.1", [])
    key, certificate = tmp_path / "ca.key", (tmp_path / "ca.crt").read_bytes()
    for name in ("ca", "ca.key", "server.crt", "../ca"):
        with pytest.raises(SystemExit, match="cannot be a node's name"):
            make(tmp_path, "127.0.0.1", [], [name])
    secret = key.read_bytes()
    key.unlink()
    with pytest.raises(SystemExit, match=r"has no ca\.key beside it"):
        make(tmp_path, "127.0.0.1", [], ["server"])
    assert (tmp_path / "ca.crt").read_bytes() == certificate
    key.write_bytes(secret)
    (tmp_path / "ca.crt").unlink()
    make(tmp_path, "127.0.0.1", [])  # a certificate for the key that there is
    assert is_signed(tmp_path)


def test_git_ignores_the_folder(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "keys", "--nodes", "site-0"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = subprocess.run(
        ["git", "status", "--short", "-uall"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert said.stdout == ""
