"""Which key files sign engines and check signatures; the others are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.signing import make_pem_key, make_ssh_key, run_tool, write_engine_files

from llmctl.builder.signature import require_signed, sign_engine
from llmctl.builder.signing_keys import PublicKey, SigningKey
from llmctl.errors import BadKey

pytest.importorskip("cryptography", reason="the extra `sign` is not installed")


def test_pem_keys_of_openssl_are_read(tmp_path):
    private, public = make_pem_key(tmp_path / "key")
    folder = write_engine_files(tmp_path / "engine")
    sign_engine(folder, SigningKey.read(private))
    require_signed(folder, PublicKey.read(public))


@pytest.mark.parametrize("kind", ["rsa", "ecdsa"])
def test_a_key_of_another_type_is_refused(tmp_path, kind):
    path = make_ssh_key(tmp_path / "key", kind)
    with pytest.raises(BadKey, match=f"(?i)is a key of type .*{kind[:2]}.*Ed25519 is wanted"):
        SigningKey.read(path)
    with pytest.raises(BadKey, match="Ed25519 is wanted"):
        PublicKey.read(Path(f"{path}.pub"))


def test_an_x25519_key_is_refused(tmp_path):
    private, public = make_pem_key(tmp_path / "key", "X25519")
    for read, path in ((SigningKey.read, private), (PublicKey.read, public)):
        with pytest.raises(BadKey, match="is a key of type X25519; Ed25519 is wanted"):
            read(path)


def test_a_key_with_a_passphrase_is_refused_with_what_to_do(tmp_path):
    path = make_ssh_key(tmp_path / "key", passphrase="secret word")
    with pytest.raises(BadKey, match="protected by a passphrase") as caught:
        SigningKey.read(path)
    assert "ssh-keygen -p" in caught.value.fix
    pem = tmp_path / "key.pem"
    make = ["openssl", "genpkey", "-algorithm", "ED25519", "-aes256", "-pass", "pass:secret"]
    run_tool(*make, "-out", pem)
    with pytest.raises(BadKey, match="protected by a passphrase"):
        SigningKey.read(pem)


def test_what_is_no_key_is_refused(tmp_path):
    key = make_ssh_key(tmp_path / "key")
    public = Path(f"{key}.pub")
    two = tmp_path / "two.pub"
    two.write_text(public.read_text() * 2)
    torn = tmp_path / "torn"
    torn.write_text("\n".join(key.read_text().splitlines()[:3]))
    large = tmp_path / "large"
    large.write_bytes(b"PRIVATE KEY" + bytes(100_000))
    empty = tmp_path / "empty"
    empty.write_bytes(b"")
    for read, path, why in (
        (SigningKey.read, public, "holds no private key"),
        (SigningKey.read, torn, "is no readable private key"),
        (SigningKey.read, large, "has over"),
        (SigningKey.read, tmp_path / "none", "cannot be read"),
        (SigningKey.read, tmp_path, "cannot be read"),
        (PublicKey.read, key, "holds a private key"),
        (PublicKey.read, two, "has 2 lines"),
        (PublicKey.read, empty, "has 0 lines"),
        (PublicKey.read, Path(__file__), "lines; one public key"),
        (PublicKey.read, tmp_path / "none", "cannot be read"),
    ):
        with pytest.raises(BadKey, match=why):
            read(path)
    (tmp_path / "junk").write_text("ssh-ed25519 AAAA")
    with pytest.raises(BadKey, match="is no readable public key"):
        PublicKey.read(tmp_path / "junk")
