"""Make the files that a federation with TLS needs: a certificate authority, the server's certificate, a key per node.

    python keys.py DIR --host 127.0.0.1 --nodes site-0,site-1,site-2,site-3
    python keys.py DIR --host fl.example.org --renew server      # a new certificate, signed by the same authority
    python keys.py DIR --renew site-3                            # a new key for a node

What exists is kept: the authority is never overwritten, and what --renew replaces is kept as NAME.old. The folder
ignores itself in git. For a real federation, make the authority's key on a separate machine, and let every site make
its own key (ssh-keygen -t ecdsa -b 384 -N "" -f site-3). The site sends only the .pub file.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import re
import sys
from collections.abc import Collection
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM, OPENSSH = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
PLAIN = serialization.NoEncryption()
NAME = "FedALIGN federation"
AUTHORITY_DAYS, SERVER_DAYS = 3650, 365


def certificate(
    subject: str, issuer: str, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey, host: str | None
) -> x509.Certificate:
    """Sign a certificate: the authority's own (no host), or one for a host."""

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=AUTHORITY_DAYS if host is None else SERVER_DAYS))
        .add_extension(x509.BasicConstraints(host is None, None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if host is None:
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        builder = builder.add_extension(usage, critical=True)
    else:
        names: list[x509.GeneralName] = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
        builder = builder.add_extension(x509.SubjectAlternativeName(list(dict.fromkeys(names))), critical=False)
    return builder.sign(signer, hashes.SHA256())


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read."""
    path.touch(mode=0o600)
    path.write_bytes(content)


def set_aside(folder: Path, names: Collection[str]) -> None:
    """Keep files that are about to be replaced, as NAME.old."""
    for path in (folder / name for name in names):
        if path.exists():
            path.rename(path.with_name(f"{path.name}.old"))


def authority_of(folder: Path) -> ec.EllipticCurvePrivateKey:
    """Return the key of the folder's certificate authority, which is made if there is none, and never replaced."""
    key_file, certificate_file = folder / "ca.key", folder / "ca.crt"
    if key_file.exists():
        key = serialization.load_pem_private_key(key_file.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
    elif certificate_file.exists():
        sys.exit(f"{certificate_file} has no ca.key beside it, which signs certificates: bring it back first")
    else:
        key = ec.generate_private_key(ec.SECP256R1())
        write_private(key_file, key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, PLAIN))
    if not certificate_file.exists():
        certificate_file.write_bytes(certificate(NAME, NAME, key, key, None).public_bytes(PEM))
    return key


def make(folder: Path, host: str, nodes: Collection[str], renew: Collection[str] = ()) -> list[str]:
    """Write ca.crt, ca.key, server.crt and server.key, and for every node a private key NODE and its NODE.pub.

    What exists is kept, but for what ``renew`` names: ``server`` or nodes. Returns the names of what was made.
    """
    for name in {*nodes, *renew}:
        if (
            not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", name)
            or name == "ca"
            or (name == "server" and name in nodes)
        ):
            sys.exit(f"{name!r} cannot be a node's name: use letters, digits, - and _, and neither ca nor server")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    made = [] if (folder / "ca.crt").exists() else ["ca"]
    for name in renew:
        if name != "server":
            set_aside(folder, [name, f"{name}.pub"])
    if made or "server" in renew or not (folder / "server.crt").exists():
        authority, server = authority_of(folder), ec.generate_private_key(ec.SECP256R1())
        set_aside(folder, ["server.crt", "server.key"])
        write_private(folder / "server.key", server.private_bytes(PEM, serialization.PrivateFormat.PKCS8, PLAIN))
        (folder / "server.crt").write_bytes(certificate(host, NAME, server, authority, host).public_bytes(PEM))
        made.append("server")
    for node in dict.fromkeys([*nodes, *(name for name in renew if name != "server")]):
        if (folder / node).exists():
            continue
        key = ec.generate_private_key(ec.SECP384R1())
        write_private(folder / node, key.private_bytes(PEM, OPENSSH, PLAIN))
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"{node}.pub").write_bytes(public + b"\n")
        made.append(node)
    return made


def main() -> None:
    """Make the files that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1", help="the name or address that nodes connect to")
    parser.add_argument("--nodes", default="", help="names of nodes to make keys for, separated by commas")
    parser.add_argument("--renew", default="", help="what to replace: server, or names of nodes, separated by commas")
    options = parser.parse_args()
    nodes, renew = ([n for n in text.split(",") if n] for text in (options.nodes, options.renew))
    if {"ca", "ca.key", "ca.crt"} & {*nodes, *renew}:
        parser.error("the authority is not replaced: make a new one in another folder")
    made = make(options.folder, options.host, nodes, renew)
    print(f"made {', '.join(made)} in {options.folder}" if made else f"{options.folder} has everything")


if __name__ == "__main__":
    main()
