"""A few requests to a running server, whose log probabilities show which rotations it reads."""

import os
import re
import secrets
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from rotationzoo.artifact.measured import Probe
from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError, Undecided, UsageError
from rotationzoo.model.source import model_words
from rotationzoo.network import limits
from rotationzoo.network.huggingface_session import limit_sessions
from rotationzoo.network.tokens import check_token
from rotationzoo.storage import strict_json
from rotationzoo.storage.strict_json import Strict
from rotationzoo.words import shortened

KEY = "OPENAI_API_KEY"  # with the server's key, as for vLLM's and OpenAI's clients
SECONDS = 120.0  # for one answer: a CPU takes 0.15 s a token, and other requests may come first
NEAR = 0.6
"""Up to this fraction of what rounding changes, two readings are the same. For the demo model in
float32 and bfloat16, a server is 0 to 0.49 from the record; without the artifact, 0 to 0.34 from
the exact model; with other rotations or rounding, 1.08 or more; with half the window, 0.70."""
LEAST_CHANGE = 0.05  # nats: the demo's are 0.15, and bfloat16 alone moves a server by 0.05
LEAST_COMPARED = 40  # log probabilities, of at least eight tokens
_ARTIFACT = re.compile(r'(?m)^rotationzoo_artifact_info\{.*artifact="([0-9a-f]+)"')

Verdict = Literal["in use", "exact", "other", "unclear"]
Content = TypeVar("Content")


@dataclass(frozen=True)
class ServerCheck:
    """What a server's log probabilities say. Distances are mean absolute differences in nats."""

    compared: int  # log probabilities of tokens that were read from a cache with codes
    change: float  # from the exact model to the record: what rounding changes
    to_record: float  # from the server to the record
    to_exact: float  # from the server to the exact model
    artifact: str | None = None  # the sha256 at its `/metrics`, if any

    @property
    def verdict(self) -> Verdict:
        """Which cache the server reads."""
        near_record = self.to_record <= NEAR * self.change
        near_exact = self.to_exact <= NEAR * self.change
        is_little = self.compared < LEAST_COMPARED or self.change < LEAST_CHANGE
        if is_little or (near_record and near_exact):
            return "unclear"
        if near_record:
            return "in use"
        return "exact" if near_exact else "other"

    @property
    def words(self) -> str:
        """The distances in a sentence."""
        return (
            f"{self.compared} log probabilities are {self.to_record:.3f} nats from the record and "
            f"{self.to_exact:.3f} from the exact model, which rounding moves by {self.change:.3f}"
        )


class _Model(Strict):
    id: str
    owned_by: str = ""
    max_model_len: int | None = None


class _Models(Strict):
    data: Annotated[list[_Model], Field(min_length=1)]


class LogProbabilities(Strict):
    """An answer's tokens, as `token_id:7`, and the most probable candidates for each."""

    tokens: list[str]
    top_logprobs: list[dict[str, float]]


class _Choice(Strict):
    logprobs: LogProbabilities | None = None


class _Completion(Strict):
    choices: Annotated[list[_Choice], Field(min_length=1)]


def recorded_probes(artifact: Artifact) -> list[Probe]:
    """The recorded answers of a server with these rotations. Raises `RotationZooError` if none."""
    probes = artifact.measured.probes if artifact.measured else []
    if not probes:
        model, *revision = model_words(artifact)
        words = ["rotationzoo", "evaluate", model, str(artifact.folder), "--save", *revision]
        hint = f"record them with: {shlex.join(words)}"
        raise RotationZooError(f"{artifact.folder} has no record of a server's answers", hint)
    return probes


@dataclass(frozen=True)
class Server:
    """A server that should read an artifact. Raises `UsageError` if the address is not HTTP."""

    address: str
    artifact: Artifact
    probes: Sequence[Probe]

    def __post_init__(self) -> None:
        if not re.match(r"https?://[^/]", self.address):
            hint = "--server http://127.0.0.1:8000"
            raise UsageError(f"{self.address} is not the address of a server", hint)

    def read(self) -> ServerCheck:
        """Compare how it continues the recorded prompts. Raises `RotationZooError` if it fails."""
        model = self._ask("v1/models", _Models).data[0]
        if model.owned_by != "vllm":
            raise self.refuse("is not vLLM")
        needed = max(len(probe.prompt) + len(probe.tokens) for probe in self.probes)
        if model.max_model_len is not None and model.max_model_len < needed:
            raise self.refuse(
                f"takes {model.max_model_len:,} tokens, and the record has {needed:,}"
            )
        reading = compare(self.probes, [self._continue(model.id, each) for each in self.probes])
        named = None
        with suppress(RotationZooError):
            named = _ARTIFACT.search(self._ask("metrics", str))
        return replace(reading, artifact=named and named[1])

    def refusal(self, reading: ServerCheck) -> RotationZooError | None:
        """The error for what a server reads; None for the artifact's rotations."""
        if reading.artifact not in (None, self.artifact.identity):
            return self.refuse(f"serves another artifact, by its metrics: {reading.artifact}")
        if reading.verdict == "unclear":
            words = f"the check cannot tell which rotations the server at {self.address} reads"
            hint = "see in the server's log how many layers are stored in 2 bits"
            return Undecided(f"{words}: {reading.words}", hint)
        problems = {
            "exact": "reads an exact cache: the artifact is not in use",
            "other": "reads other rotations, or was started with another model, other windows or "
            "other rounding",
        }
        problem = problems.get(reading.verdict)
        return self.refuse(f"{problem} ({reading.words})") if problem else None

    def refuse(self, problem: str) -> RotationZooError:
        """The error for a server, with the command that starts the right one."""
        words = ["serve", *model_words(self.artifact), "--rotations", str(self.artifact.folder)]
        hint = f"start it with: {shlex.join(['rotationzoo', *words])}"
        return RotationZooError(f"the server at {self.address} {problem}", hint=hint)

    def _continue(self, model: str, probe: Probe) -> LogProbabilities:
        request = {
            "model": model,
            "prompt": probe.prompt,
            "max_tokens": len(probe.tokens),
            "temperature": 0,
            "repetition_penalty": 1.0,  # the model's default may differ
            "ignore_eos": True,
            "logprobs": len(probe.candidates[0]),
            "return_tokens_as_token_ids": True,
            # Fewer candidates mean fewer near ties, which end the comparison.
            "allowed_token_ids": sorted(set(probe.tokens)),
            # The prompt must be read exact: a cached prefix would be read from codes.
            "cache_salt": secrets.token_hex(16),
        }
        answer = self._ask("v1/completions", _Completion, request).choices[0].logprobs
        if answer is None:
            raise self.refuse("gives no log probabilities")
        return answer

    def _ask(
        self, path: str, kind: type[Content], request: dict[str, Any] | None = None
    ) -> Content:
        url = f"{self.address.rstrip('/').removesuffix('/v1')}/{path}"
        httpx = limit_sessions().httpx
        key = check_token(os.environ.get(KEY), KEY)
        headers = {"accept-encoding": "identity"}
        if key:
            headers["authorization"] = f"Bearer {key}"

        def ask() -> tuple[int, bytes]:
            method = "GET" if request is None else "POST"
            options = {"json": request, "headers": headers, "timeout": SECONDS}
            with httpx.stream(method, url, **options) as response:
                limits.check_encoding(response.headers, url)
                chunks = limits.limit_chunks(response.iter_raw(), limits.ANSWER_BYTES, url)
                return response.status_code, b"".join(chunks)

        try:
            status, content = limits.call_within(SECONDS, ask, self.address)
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.refuse(f"does not answer: {error}") from error
        text = content.decode(errors="replace")
        if status == 401:
            raise self.refuse(f"does not accept the key in {KEY}")
        if status != 200:
            words = shortened(" ".join(text.split()))
            raise self.refuse(f"answers with status {status}: {words}")
        if isinstance(text, kind):
            return text
        what = f"the answer of {url}"
        return strict_json.validate(kind, strict_json.parse(content, what), what)


def compare(probes: Sequence[Probe], answers: Sequence[LogProbabilities]) -> ServerCheck:
    """Compare answers with the record up to the first different token, except the first token."""
    changes, to_record, to_exact = [], [], []
    for probe, answer in zip(probes, answers, strict=True):
        tables = probe.candidates, probe.log_probabilities, probe.exact
        said = zip(answer.tokens, answer.top_logprobs, strict=False)
        # A server may send more or fewer tokens than it was asked for.
        places = zip(probe.tokens, said, *tables, strict=False)
        for place, (expected, (token, top), *columns) in enumerate(places):
            for candidate, record, exact in zip(*columns, strict=True):
                served = top.get(f"token_id:{candidate}")
                if place and served is not None:
                    changes.append(abs(record - exact))
                    to_record.append(abs(served - record))
                    to_exact.append(abs(served - exact))
            if token != f"token_id:{expected}":
                break
    if not changes:
        return ServerCheck(0, 0.0, 0.0, 0.0)
    return ServerCheck(len(changes), fmean(changes), fmean(to_record), fmean(to_exact))
