"""A Sigstore on the loopback interface, for the unmodified client libraries: the issuer of
identities, the certificate authority (Fulcio) and the transparency log (Rekor).

It does only what the clients verify: certificates of ten minutes with the identity of a token,
logged certificates (RFC 6962, section 3.2), and logs with one signed entry each.
"""

import base64
import datetime
import hashlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path

import jwt
import rfc8785
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from support.hubs.hub import Answer, Call, as_json

GITHUB = "https://token.actions.githubusercontent.com"
WORKFLOW = "https://github.com/someone/zoo/.github/workflows/regenerate.yml@refs/heads/main"
_ISSUER = x509.ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_TIMESTAMPS = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_MINUTES = datetime.timedelta(minutes=10)
Key = ec.EllipticCurvePrivateKey


def new_key() -> Key:
    return ec.generate_private_key(ec.SECP256R1())


def spki(key: Key) -> bytes:
    return key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def key_id(key: Key) -> bytes:
    return hashlib.sha256(spki(key)).digest()


def text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _builder(names, public_key, valid, extensions) -> x509.CertificateBuilder:
    """`names`: subject and issuer. `extensions`: extension -> whether it is critical."""
    builder = x509.CertificateBuilder().subject_name(names[0]).issuer_name(names[1])
    builder = builder.public_key(public_key).serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(valid[0]).not_valid_after(valid[1])
    for extension, critical in extensions.items():
        builder = builder.add_extension(extension, critical)
    return builder


@dataclass
class LocalSigstore:
    """`late`: the time of a log entry after its certificate. `identity`: that of every token."""

    late: datetime.timedelta = datetime.timedelta(0)
    identity: str = WORKFLOW
    endpoint: str = ""
    storage_origin: str = ""  # set by the server, as for hubs
    requests: list[str] = field(default_factory=list)
    root_key: Key = field(default_factory=new_key)
    timestamp_key: Key = field(default_factory=new_key)
    log_key: Key = field(default_factory=new_key)

    def __post_init__(self) -> None:
        self.now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "local authority")])
        public, day = self.root_key.public_key(), datetime.timedelta(days=1)
        valid = self.now - day, self.now + day
        for_certificates = x509.KeyUsage(*[False] * 5, True, True, False, False)
        identifier = x509.SubjectKeyIdentifier.from_public_key(public)
        extensions = {x509.BasicConstraints(True, 0): True, for_certificates: True}
        builder = _builder((name, name), public, valid, extensions | {identifier: False})
        self.root = builder.sign(self.root_key, hashes.SHA256())

    def token(self) -> str:
        """A token from the issuer of identities; nothing here checks its signature."""
        now = int(datetime.datetime.now(datetime.UTC).timestamp())
        claims = {
            "iss": GITHUB,
            "sub": self.identity,
            "job_workflow_ref": self.identity.removeprefix("https://github.com/"),
            "aud": "sigstore",
            "iat": now,
            "exp": now + 600,
        }
        return jwt.encode(claims, "a secret that only this test knows: 0123456789", "HS256")

    def certify(self, public_key: ec.EllipticCurvePublicKey, token: str) -> x509.Certificate:
        """Fulcio: a certificate for the token's identity, with a promise to log it."""
        claims = jwt.decode(token, options={"verify_signature": False})
        valid = self.now, self.now + _MINUTES
        authority = self.root_key.public_key()
        extensions = {
            x509.KeyUsage(True, *[False] * 8): True,  # only signatures
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]): False,
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(claims["sub"])]): True,
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority): False,
            x509.UnrecognizedExtension(_ISSUER, claims["iss"].encode()): False,
        }
        names = x509.Name([]), self.root.subject
        builder = _builder(names, public_key, valid, extensions)
        # The log signs the certificate without its own promise.
        before = builder.sign(self.root_key, hashes.SHA256()).tbs_certificate_bytes
        promise = x509.UnrecognizedExtension(_TIMESTAMPS, self._timestamps(before))
        return builder.add_extension(promise, critical=False).sign(self.root_key, hashes.SHA256())

    def _timestamps(self, certificate: bytes) -> bytes:
        """A list of one signed certificate timestamp, in DER."""
        milliseconds = int(self.now.timestamp() * 1000)
        length = len(certificate).to_bytes(3)
        entry = key_id(self.root_key) + length + certificate
        signed = struct.pack("!BBQH", 0, 0, milliseconds, 1) + entry + b"\0\0"
        signature = self.timestamp_key.sign(signed, ec.ECDSA(hashes.SHA256()))
        stamp = b"\0" + key_id(self.timestamp_key) + struct.pack("!Q", milliseconds) + b"\0\0"
        stamp += b"\4\3" + struct.pack("!H", len(signature)) + signature
        listed = struct.pack("!H", len(stamp)) + stamp
        listed = struct.pack("!H", len(listed)) + listed
        return b"\4" + bytes([0x81, len(listed)] if len(listed) > 127 else [len(listed)]) + listed

    def enter(self, proposed: dict) -> dict:
        """Rekor: the entry of a signature in a log without other entries."""
        content = proposed["spec"]["proposedContent"]
        envelope = json.loads(content["envelope"])
        (signature,), (certificate,) = envelope["signatures"], content["verifiers"]
        spec = {
            "envelopeHash": _sha256(content["envelope"].encode()),
            "payloadHash": _sha256(base64.b64decode(envelope["payload"])),
            "signatures": [{"signature": signature["sig"], "verifier": certificate}],
        }
        body = rfc8785.dumps({"apiVersion": "0.0.1", "kind": "dsse", "spec": spec})
        leaf = hashlib.sha256(b"\0" + body).digest()
        note = f"local log - 1\n1\n{text(leaf)}\n"
        log_signature = key_id(self.log_key)[:4] + self._sign_log(note.encode())
        entry = {
            "body": text(body),
            "integratedTime": int((self.now + self.late).timestamp()) + 1,
            "logID": key_id(self.log_key).hex(),
            "logIndex": 0,
        }
        proof = {
            "logIndex": 0,
            "rootHash": leaf.hex(),
            "treeSize": 1,
            "hashes": [],
            "checkpoint": f"{note}\n\u2014 local {text(log_signature)}\n",
        }
        promise = text(self._sign_log(rfc8785.dumps(entry)))
        verification = {"inclusionProof": proof, "signedEntryTimestamp": promise}
        return {leaf.hex(): {**entry, "verification": verification}}

    def _sign_log(self, data: bytes) -> bytes:
        return self.log_key.sign(data, ec.ECDSA(hashes.SHA256()))

    def write_trust(self, path: Path) -> Path:
        """The trust configuration of clients, with these keys and addresses."""
        valid = {"start": (self.now - datetime.timedelta(days=1)).isoformat()}
        raw = text(self.root.public_bytes(serialization.Encoding.DER))
        authority = {
            "subject": {"organization": "local", "commonName": "local authority"},
            "uri": self.endpoint,
            "certChain": {"certificates": [{"rawBytes": raw}]},
            "validFor": valid,
        }
        service = {"majorApiVersion": 1, "validFor": valid, "operator": "local"}
        services = [{**service, "url": self.endpoint}]
        content = {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": {
                "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
                "tlogs": [self._log(self.log_key, valid)],
                "certificateAuthorities": [authority],
                "ctlogs": [self._log(self.timestamp_key, valid)],
                "timestampAuthorities": [],
            },
            "signingConfig": {
                "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
                "caUrls": services,
                "oidcUrls": services,
                "rekorTlogUrls": services,
                "rekorTlogConfig": {"selector": "ANY"},
                "tsaUrls": [],
            },
        }
        path.write_text(json.dumps(content))
        return path

    def _log(self, key: Key, valid: dict) -> dict:
        public = {"rawBytes": text(spki(key)), "keyDetails": "PKIX_ECDSA_P256_SHA_256"}
        log = {"baseUrl": self.endpoint, "hashAlgorithm": "SHA2_256"}
        key_of_log = {"publicKey": {**public, "validFor": valid}}
        return log | key_of_log | {"logId": {"keyId": text(key_id(key))}}

    def record(self, call: Call) -> None:
        self.requests.append(call.path)

    def answer(self, call: Call) -> Answer:
        return as_json(self._content(call), 201 if call.method == "POST" else 200)

    def _content(self, call: Call) -> dict:
        if call.path == "/.well-known/openid-configuration":
            addresses = {"authorization_endpoint": "auth", "token_endpoint": "token"}
            return {name: f"{self.endpoint}/{place}" for name, place in addresses.items()}
        if call.path == "/token":  # of GitHub Actions
            return {"value": self.token()}
        body = call.json()
        if call.path == "/api/v2/signingCert":
            request = x509.load_pem_x509_csr(base64.b64decode(body["certificateSigningRequest"]))
            token = call.headers["Authorization"].removeprefix("Bearer ")
            chain = [pem(self.certify(request.public_key(), token)), pem(self.root)]
            return {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}}
        assert call.path == "/api/v1/log/entries", call.path
        return self.enter(body)


def _sha256(data: bytes) -> dict[str, str]:
    return {"algorithm": "sha256", "value": hashlib.sha256(data).hexdigest()}
