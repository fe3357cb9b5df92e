"""The options that several commands share, with their choices."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rotationzoo.cli.completion import (
    TASKS,
    complete_artifact,
    complete_index,
    complete_model,
    complete_tasks,
)
from rotationzoo.codec.formats import SIMULATED
from rotationzoo.zoo.hubs.registry import HUB_NAMES

if TYPE_CHECKING:
    HubOrBoth = str
    HubOrAny = str
    Format = str
    CacheFormat = str
else:
    # Typer reads the choices from the type at run time, but mypy rejects a computed Literal.
    HubOrBoth = Literal[(*HUB_NAMES, "both")]
    HubOrAny = Literal[(*HUB_NAMES, "any")]
    Format = Literal[tuple(SIMULATED)]
    CacheFormat = Literal[(*SIMULATED, "kivi")]

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print names only.")]

ModelName = Annotated[
    str,
    typer.Argument(help="A hub id, a local folder, or demo.", autocompletion=complete_model),
]
ArtifactFolder = Annotated[
    Path,
    typer.Argument(
        help="The folder that calibrate wrote.",
        metavar="ARTIFACT",
        autocompletion=complete_artifact,
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")]

Subset = Annotated[str | None, typer.Option(help="The data set's configuration.")]
Split = Annotated[str | None, typer.Option(help="The data set's split (train).")]
Column = Annotated[str | None, typer.Option(help="Column of the text or of the chat messages.")]

TextLength = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens per text (2048, or more where the windows leave nothing)."),
]

Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where to run.")]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float32"],
    typer.Option(help="auto: the model's own, float32 on a CPU."),
]
DeviceMap = Annotated[
    str | None, typer.Option(help="auto: spread over GPUs, main memory and disk.")
]
MaxMemory = Annotated[
    str | None, typer.Option(help="Limits for the device map: 0=20GiB,cpu=60GiB.")
]

RopeScaling = Annotated[
    str | None,
    typer.Option(
        help="Scale RoPE to more positions: yarn:4 or linear:2, or yarn:4:32768 for a model that "
        "was trained on other positions than its config says."
    ),
]

Clip = Annotated[
    str | None,
    typer.Option("--clip", help="Clip ratios of keys and values, as 0.96/0.92, or one for both."),
]
Windows = Annotated[
    str | None, typer.Option("--windows", help="Sink and recent tokens kept exact, as 64/256.")
]

PrefillLayout = Annotated[
    Literal["server", "window"] | None,
    typer.Option(
        help="Exact between chunks: the sink alone, as OSCAR's server has it (server), or the "
        "recent window too."
    ),
]

Tasks = Annotated[
    str,
    typer.Option(
        help=f"Recall tasks: {', '.join(TASKS)}; all or none.", autocompletion=complete_tasks
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(help="Tokens per prompt of the tasks, as 2048,8192 (--length)."),
]
Questions = Annotated[int, typer.Option(min=1, help="Questions per task and length.")]

Signers = Annotated[
    list[str] | None,
    typer.Option(
        "--signer",
        metavar="SIGNER",
        help="Accept only what this identity, or this public key (a .pem file), has signed. "
        "May be repeated.",
    ),
]
Issuer = Annotated[
    str | None,
    typer.Option(help="Who vouches for the identity; not needed for workflows of GitHub."),
]
RequireSignature = Annotated[
    bool, typer.Option("--require-signature", help="Refuse what is not signed.")
]
TrustConfig = Annotated[
    Path | None,
    typer.Option(help="Keys of another Sigstore than the public one, as a JSON file."),
]
SignWith = Annotated[
    str | None,
    typer.Option(
        "--sign",
        help="keyless, the file of a private key (.pem), or none. Unless given, jobs of GitHub "
        "Actions with an identity sign keyless.",
    ),
]
AdoptIndex = Annotated[
    bool,
    typer.Option(
        "--adopt-index", help="Sign the index although others signed what it lists, or nobody."
    ),
]

IndexPlace = Annotated[
    str | None,
    typer.Option("--index", help="Path or URL of a zoo_index.json.", autocompletion=complete_index),
]
ZooRepo = Annotated[
    str | None, typer.Option("--repo", help="The zoo repository whose index to read.")
]
