"""Signature files that are none, and signatures that were tampered with."""

import base64
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from rotationzoo.errors import RotationZooError
from rotationzoo.settings import Signatures
from rotationzoo.zoo.signing import Signed, check_signature, make_demand

FILES = {"manifest.json": b"{}", "rotations.safetensors": b"rotations"}


@pytest.fixture
def signed(keys) -> dict:
    """A signature of `FILES`, as JSON."""
    from rotationzoo.zoo.signing import SigningTool

    data, signer = SigningTool(keys.ours).sign(FILES, "oscar-0123")
    assert signer == make_demand(Signatures(signers=[str(keys.public)])).signers[0]
    return json.loads(data)


def check(content: dict, keys) -> None:
    demand = make_demand(Signatures(signers=[str(keys.public)]))
    check_signature(Signed("it", FILES, json.dumps(content).encode()), demand)


@contextmanager
def edited_statement(content: dict) -> Iterator[dict]:
    """What a signature states, which is put back when the block ends."""
    envelope = content["dsseEnvelope"]
    said = json.loads(base64.b64decode(envelope["payload"]))
    yield said
    envelope["payload"] = base64.b64encode(json.dumps(said).encode()).decode()


def stating(change: Callable[[dict], object]) -> Callable[[dict], None]:
    """A change of the signature that makes this change of its statement."""

    def apply(content: dict) -> None:
        with edited_statement(content) as said:
            change(said)

    return apply


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts.pop("verificationMaterial"),
        lambda parts: parts.pop("dsseEnvelope"),
        lambda parts: parts["verificationMaterial"].pop("publicKey"),
        lambda parts: parts["verificationMaterial"].update(publicKey={"hint": "x"}),
        lambda parts: parts["verificationMaterial"].update(certificate={"rawBytes": "AAAA"}),
        lambda parts: parts["dsseEnvelope"].update(payload="no base64"),
        lambda parts: parts["dsseEnvelope"].update(payload=1234),
        lambda parts: parts["dsseEnvelope"].update(payloadType="text/plain"),
        lambda parts: parts["dsseEnvelope"].update(signatures=[]),
        lambda parts: parts["dsseEnvelope"].update(signatures=[{"sig": "AAAA"}] * 2),
        stating(lambda said: said.update(_type="other")),
        stating(lambda said: said.update(predicateType="https://slsa.dev/provenance/v1")),
        stating(lambda said: said["predicate"]["resources"][0].update(algorithm="md5")),
        stating(
            lambda said: said["predicate"].update(resources=2 * said["predicate"]["resources"])
        ),
    ],
)
def test_a_signature_that_lacks_a_part_or_states_something_else_is_damaged(signed, keys, change):
    change(signed)
    with pytest.raises(RotationZooError, match=r"the signature of it is (damaged|invalid)"):
        check(signed, keys)


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("what", ["statement", "signature", "file", "no file", "one file more"])
def test_a_signature_that_was_tampered_with_does_not_hold(signed, keys, what):
    with edited_statement(signed) as said:
        resources = said["predicate"]["resources"]
        if what == "statement":
            said["subject"][0]["name"] = "another model"
        if what == "file":
            resources[0]["digest"] = "0" * 64
        if what == "no file":
            del resources[0]
        if what == "one file more":
            resources.append({**resources[0], "name": "more.bin"})
    if what == "signature":
        signed["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(b"0" * 70).decode()
    with pytest.raises(RotationZooError, match=r"is invalid|is for other files") as refusal:
        check(signed, keys)
    assert refusal.value.hint


@pytest.mark.hostile("hub")
def test_a_signature_with_the_hint_of_a_key_that_did_not_make_it(signed, keys):
    from rotationzoo.zoo.signing import SigningTool

    other = json.loads(SigningTool(keys.other).sign(FILES, "oscar-0123")[0])
    other["verificationMaterial"] = signed["verificationMaterial"]
    with pytest.raises(RotationZooError, match="is invalid: it was not made with that key"):
        check(other, keys)


@pytest.mark.hostile("hub")
@pytest.mark.parametrize("certificate", [b"", b"no certificate"])
def test_a_certificate_that_is_none(signed, keys, certificate):
    raw = base64.b64encode(certificate).decode()
    signed["verificationMaterial"] = {"certificate": {"rawBytes": raw}}
    with pytest.raises(RotationZooError, match="no certificate that names its signer"):
        check(signed, keys)


@pytest.mark.hostile("malformed")
@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"a": 1, "a": 2}', b"[" * 10_000])
def test_a_signature_that_is_no_json(data):
    """Also where the extra is not installed."""
    with pytest.raises(RotationZooError, match="the signature of it is damaged"):
        check_signature(Signed("it", FILES, data), make_demand(Signatures()))
