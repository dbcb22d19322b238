"""Signatures of a ledger: any private key in the PEM or the OpenSSH format signs, such as that of the server's TLS."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedalign.errors import FedalignError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

_CONTEXT = b"fedalign ledger 1\n"  # so that no signature for another purpose passes for one of a ledger
SERVER_KEY = Path("~/.fedalign/ledger.key")  #: of a server over Flower whose settings name none; it is made once


@dataclass(frozen=True)
class Signer:
    """Signs the lines of a ledger.

    >>> import tempfile
    >>> signer = Signer.own(Path(tempfile.mkdtemp()) / "ledger.key")
    >>> holds(load_public(signer.public), "ab12", signer.sign("ab12"))
    True
    """

    key: Any
    public: str  #: the public key, in the PEM format

    @classmethod
    def read(cls, path: Path) -> Signer:
        """Read a private key; raises :class:`FedalignError` for a file that is none, or one with a password."""
        serialization = _primitives().serialization
        try:
            data = path.read_bytes()
        except OSError as error:
            raise FedalignError(f"cannot read the ledger's key {path}: {error.strerror}") from error
        load = serialization.load_ssh_private_key if b"OPENSSH" in data[:64] else serialization.load_pem_private_key
        try:
            key = load(data, None)
        except (ValueError, TypeError) as error:
            raise FedalignError(f"{path} is no private key without a password, which ledger.key must be") from error
        public = key.public_key()
        _check_kind(public, str(path))
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return cls(key, public.public_bytes(serialization.Encoding.PEM, form).decode())

    @classmethod
    def own(cls, path: Path) -> Signer:
        """Read a key, or make one that only its owner can read if there is none."""
        if not path.exists():
            serialization = _primitives().serialization
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

            form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            data = Ed25519PrivateKey.generate().private_bytes(serialization.Encoding.PEM, form, plain)
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.{os.getpid()}")
            fresh.touch(mode=0o600)
            fresh.write_bytes(data)
            try:
                os.link(fresh, path)  # never over a key that another server has just made
            except FileExistsError:
                return cls.read(path)
            finally:
                fresh.unlink()
        return cls.read(path)

    def sign(self, digest: str) -> str:
        """Return the signature of a line's hash, in hexadecimal."""
        from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa

        hashes, message = _primitives().hashes, _CONTEXT + digest.encode()
        if isinstance(self.key, rsa.RSAPrivateKey):
            return self.key.sign(message, padding.PKCS1v15(), hashes.SHA256()).hex()
        if isinstance(self.key, ec.EllipticCurvePrivateKey):
            return self.key.sign(message, ec.ECDSA(hashes.SHA256())).hex()
        return str(self.key.sign(message).hex())


def load_public(text: str) -> PublicKeyTypes:
    """Read a public key or a certificate, in the PEM or the OpenSSH format; raises :class:`FedalignError` else."""
    serialization, data = _primitives().serialization, text.encode()
    try:
        key: Any
        if b"BEGIN CERTIFICATE" in data:
            from cryptography import x509

            key = x509.load_pem_x509_certificate(data).public_key()
        elif data.startswith((b"ssh-", b"ecdsa-")):
            key = serialization.load_ssh_public_key(data)
        else:
            key = serialization.load_pem_public_key(data)
    except (ValueError, TypeError) as error:
        raise FedalignError(f"this is neither a public key nor a certificate: {text[:40]!r}") from error
    _check_kind(key, "the public key")
    return key  # type: ignore[no-any-return]


def holds(key: Any, digest: str, signature: str) -> bool:
    """Say whether a signature of a line's hash was made with the private part of a key, and is as ``sign`` writes it.

    The same signature in other letters or with spaces is a changed line.
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import ec, padding, rsa

    hashes, message = _primitives().hashes, _CONTEXT + digest.encode()
    try:
        made = bytes.fromhex(signature)
        if made.hex() != signature:
            return False
        if isinstance(key, rsa.RSAPublicKey):
            key.verify(made, message, padding.PKCS1v15(), hashes.SHA256())
        elif isinstance(key, ec.EllipticCurvePublicKey):
            key.verify(made, message, ec.ECDSA(hashes.SHA256()))
        else:
            key.verify(made, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def fingerprint(key: Any) -> str:
    """Return the SHA-256 of a public key, as rosters have it."""
    serialization = _primitives().serialization
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(der).hexdigest()


def _check_kind(key: Any, where: str) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa

    edwards = ed25519.Ed25519PublicKey | ed448.Ed448PublicKey
    if not isinstance(key, ec.EllipticCurvePublicKey | rsa.RSAPublicKey | edwards):
        raise FedalignError(f"{where} cannot sign: it must be an Ed25519, Ed448, ECDSA or RSA key")


def _primitives() -> Any:
    try:
        from cryptography.hazmat import primitives
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: F401
    except ImportError as error:
        raise FedalignError("a signed ledger needs cryptography: pip install 'fedalign[flower]'") from error
    return primitives
