"""Damaged signature files, and manipulated signatures."""

import base64
import json
from collections.abc import Callable

import pytest

from rotationzoo.errors import RotationZooError
from rotationzoo.settings import Signatures
from rotationzoo.zoo.signing import Signed, SigningTool, check_signature, make_demand

FILES = {"manifest.json": b"{}", "rotations.safetensors": b"rotations"}


@pytest.fixture
def signed(keys) -> dict:
    """A signature of `FILES`, as JSON."""
    data, signer = SigningTool(keys.ours).sign(FILES, "oscar-0123")
    assert signer == make_demand(Signatures(signers=[str(keys.public)])).signers[0]
    return json.loads(data)


def check(content: dict, keys) -> None:
    demand = make_demand(Signatures(signers=[str(keys.public)]))
    check_signature(Signed("it", FILES, json.dumps(content).encode()), demand)


def stating(change: Callable[[dict], object]) -> Callable[[dict], None]:
    """The same change, of the statement in a signature."""

    def apply(content: dict) -> None:
        envelope = content["dsseEnvelope"]
        said = json.loads(base64.b64decode(envelope["payload"]))
        change(said)
        envelope["payload"] = base64.b64encode(json.dumps(said).encode()).decode()

    return apply


def resources(said: dict) -> list[dict]:
    return said["predicate"]["resources"]


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
        stating(lambda said: resources(said)[0].update(algorithm="md5")),
        stating(lambda said: resources(said).extend(resources(said))),
    ],
)
def test_a_signature_that_lacks_a_part_or_states_something_else_is_damaged(signed, keys, change):
    change(signed)
    with pytest.raises(RotationZooError, match=r"the signature of it is (damaged|invalid)"):
        check(signed, keys)


ZEROS = base64.b64encode(b"0" * 70).decode()


@pytest.mark.hostile("hub")
@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts["dsseEnvelope"]["signatures"][0].update(sig=ZEROS),
        stating(lambda said: said["subject"][0].update(name="another model")),
        stating(lambda said: resources(said)[0].update(digest="0" * 64)),
        stating(lambda said: resources(said).pop()),
        stating(lambda said: resources(said).append({**resources(said)[0], "name": "more.bin"})),
    ],
    ids=["signature", "statement", "file", "no file", "one file more"],
)
def test_a_manipulated_signature_is_invalid(signed, keys, change):
    change(signed)
    with pytest.raises(RotationZooError, match=r"is invalid|is for other files") as refusal:
        check(signed, keys)
    assert refusal.value.hint


@pytest.mark.hostile("hub")
def test_a_signature_with_the_hint_of_a_key_that_did_not_make_it(signed, keys):
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
