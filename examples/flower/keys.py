"""Make the files that a federation with TLS needs: a certificate authority, the server's certificate, a key per node.

    python keys.py DIR --host 127.0.0.1 --nodes site-0,site-1,site-2,site-3

For a real federation, make the authority's key on a separate machine, and let every site make its own key
(ssh-keygen -t ecdsa -b 384 -N "" -f site-3). The site sends only the .pub file.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PEM, OPENSSH = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH
PLAIN = serialization.NoEncryption()


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
        .not_valid_after(now + datetime.timedelta(days=365))
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


def make(folder: Path, host: str, nodes: list[str]) -> None:
    """Write ca.crt, ca.key, server.crt and server.key, and for every node a private key NODE and its NODE.pub."""
    folder.mkdir(parents=True, exist_ok=True)
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    own = certificate("FedALIGN federation", "FedALIGN federation", authority, authority, None)
    signed = certificate(host, "FedALIGN federation", server, authority, host)
    (folder / "ca.crt").write_bytes(own.public_bytes(PEM))
    (folder / "server.crt").write_bytes(signed.public_bytes(PEM))
    write_private(folder / "ca.key", authority.private_bytes(PEM, serialization.PrivateFormat.PKCS8, PLAIN))
    write_private(folder / "server.key", server.private_bytes(PEM, serialization.PrivateFormat.PKCS8, PLAIN))
    for node in nodes:
        key = ec.generate_private_key(ec.SECP384R1())
        write_private(folder / node, key.private_bytes(PEM, OPENSSH, PLAIN))
        public = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        (folder / f"{node}.pub").write_bytes(public + b"\n")


def main() -> None:
    """Make the files that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1", help="the name or address that nodes connect to")
    parser.add_argument("--nodes", default="", help="names of nodes to make keys for, separated by commas")
    options = parser.parse_args()
    make(options.folder, options.host, [n for n in options.nodes.split(",") if n])


if __name__ == "__main__":
    main()
