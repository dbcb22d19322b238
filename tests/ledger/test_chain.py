"""The file ledger.jsonl: every change of it is found, signatures hold for their key alone."""

import json

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa, x25519

import fedalign as fa
from fedalign.ledger.chain import NAME, START, read_chain, whole_line, write_line
from fedalign.ledger.signing import Signer

ROUND = {"loss": 1.0, "free_gain": 0.0, "models": 3, "note": "", "clients": []}


def written(path, rounds=5, signer=None, value=0.25):
    """Write a ledger by hand and return its lines."""
    texts, last = [], START
    first = {"ledger": 2, "experiment": "", "arm": "all", "seed": 0, "method": "exact"}
    key = {"key": "" if signer is None else signer.public}
    for row in [{**first, **key}, *({**ROUND, "round": i, "gain": value * i} for i in range(rounds))]:
        texts.append(write_line(row, last, signer))
        last = json.loads(texts[-1])["hash"]
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    return texts


def rewritten(path, texts):
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    return read_chain(path)


def private_key(path, key):
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, plain))
    return path


def test_an_honest_ledger_holds(tmp_path):
    written(tmp_path / NAME)
    chain = read_chain(tmp_path / NAME)
    assert chain.broken is None
    assert [row["round"] for row in chain.rows] == list(range(5))
    assert chain.signed_by is None


@pytest.mark.parametrize(
    ("change", "line", "why"),
    [
        (lambda t: [*t[:3], t[3].replace(b'"gain":0.5', b'"gain":0.9'), *t[4:]], 4, "has changed: its hash"),
        (lambda t: [*t[:3], *t[4:]], 4, "does not follow the line before"),
        (lambda t: [t[0], t[2], t[1], *t[3:]], 2, "does not follow the line before"),
        (lambda t: [*t[:3], t[3], *t[3:]], 5, "does not follow the line before"),
        (lambda t: t[1:], 1, "does not follow the line before"),
        (lambda t: [*t[:5], t[5][:-9]], 6, "is damaged"),
        (lambda t: [*t[:2], b"", *t[2:]], 3, "is damaged"),
        (lambda t: [*t[:2], b"[1]", *t[2:]], 3, "is damaged"),
        (lambda t: [], 1, "the ledger is empty"),
    ],
    ids=["changed", "deleted", "reordered", "repeated", "beheaded", "cut", "blank", "no object", "empty"],
)  # fmt: skip
def test_a_change_is_found(tmp_path, change, line, why):
    chain = rewritten(tmp_path / NAME, change(written(tmp_path / NAME)))
    assert chain.broken is not None
    assert chain.broken.line == line
    assert why in chain.broken.why
    assert len(chain.texts) == line - 1


def test_every_byte_of_a_line_counts(tmp_path):
    texts = written(tmp_path / NAME, rounds=2)
    for place in range(0, len(texts[1]), 3):
        byte = texts[1][place]
        changed = texts[1][:place] + bytes([byte ^ 1]) + texts[1][place + 1 :]
        assert rewritten(tmp_path / NAME, [texts[0], changed, texts[2]]).broken is not None


@pytest.mark.parametrize("added", [b" ", b"\r", b',"arm":"other"', b',"gave":99.0', b',"signature":"00"', b"0", b","])
def test_nothing_can_be_added_to_a_line(tmp_path, added):
    """Also not behind the hash, where the hash does not cover it and a repeated key would win."""
    signer = Signer.own(tmp_path / "own.key")
    for key in (None, signer):
        texts = written(tmp_path / NAME, rounds=2, signer=key)
        for line in (0, 1):
            for place in range(len(texts[line]) + 1):
                changed = texts[line][:place] + added + texts[line][place:]
                chain = rewritten(tmp_path / NAME, [changed if i == line else text for i, text in enumerate(texts)])
                assert chain.broken is not None, changed


def test_nothing_can_be_added_to_an_account(tmp_path):
    signer = Signer.own(tmp_path / "own.key")
    account = write_line({"client": "a", "gave": 0.5, "key": signer.public}, START, signer)
    assert whole_line(account)[0]["gave"] == 0.5
    for text in (
        account[:-1] + b',"gave":99.0}',
        account.replace(b'"gave":0.5', b'"gave":99.0,"gave":0.5'),
        account.replace(b'"gave":0.5', b'"gave":0.50'),
        account + b" ",
        account[:-40] + account[-40:].upper(),
    ):
        assert whole_line(text) == (None, "changed")


def test_a_line_that_no_ledger_has_is_damaged_or_changed():
    nested = b"[" * 100_000 + b"]" * 100_000
    for text in (b'{"previous":"' + START.encode() + b'","x":NaN,"hash":"0"}', nested, b'{"x":' + nested + b"}"):
        assert whole_line(text) == (None, "changed")


def test_a_chain_written_anew_holds_without_a_key_and_not_with_one(tmp_path):
    """Whoever has no key can forge an unsigned ledger, and no signed one."""
    written(tmp_path / NAME, value=0.75)
    assert read_chain(tmp_path / NAME).broken is None
    own, foreign = (Signer.own(tmp_path / f"{name}.key") for name in ("own", "foreign"))
    written(tmp_path / NAME, signer=foreign)
    assert read_chain(tmp_path / NAME).broken is None  # the first line names the foreign key
    broken = read_chain(tmp_path / NAME, own.public).broken
    assert (broken.line, "signature does not hold" in broken.why) == (1, True)
    written(tmp_path / NAME)
    assert read_chain(tmp_path / NAME, own.public).broken.line == 1


@pytest.mark.parametrize(
    "make",
    [
        ed25519.Ed25519PrivateKey.generate,
        lambda: ec.generate_private_key(ec.SECP384R1()),
        lambda: rsa.generate_private_key(65537, 2048),
    ],
    ids=["ed25519", "ecdsa", "rsa"],
)
def test_a_key_of_every_kind_signs(tmp_path, make):
    signer = Signer.read(private_key(tmp_path / "key", make()))
    texts = written(tmp_path / NAME, signer=signer)
    chain = read_chain(tmp_path / NAME, signer.public)
    assert chain.broken is None
    assert len(chain.signed_by) == 64
    text = texts[2].decode()
    cut = text.index('"signature":"') + 13
    swapped = text[:cut] + ("0" if text[cut] != "0" else "1") + text[cut + 1 :]
    assert rewritten(tmp_path / NAME, [*texts[:2], swapped.encode(), *texts[3:]]).broken.line == 3


def test_a_key_that_cannot_sign_is_refused(tmp_path):
    with pytest.raises(fa.FedalignError, match="cannot read the ledger's key"):
        Signer.read(tmp_path / "none")
    (tmp_path / "words").write_text("no key")
    with pytest.raises(fa.FedalignError, match="is no private key without a password"):
        Signer.read(tmp_path / "words")
    with pytest.raises(fa.FedalignError, match="it must be an Ed25519, Ed448, ECDSA or RSA key"):
        Signer.read(private_key(tmp_path / "exchange", x25519.X25519PrivateKey.generate()))


def test_the_servers_key_is_made_once_and_is_private(tmp_path):
    path = tmp_path / "folder" / "ledger.key"
    first, second = Signer.own(path), Signer.own(path)
    assert first.public == second.public
    assert path.stat().st_mode & 0o077 == 0
    assert [one.name for one in path.parent.iterdir()] == ["ledger.key"]
