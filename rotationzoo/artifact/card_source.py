"""What a model card says of where an artifact comes from: the command that makes it again, the
text, the machine, and who vouches for it."""

from rotationzoo.artifact.manifest import Calibration, Imported, Manifest
from rotationzoo.artifact.reproduce import RECIPE_FILE, reproduce_command
from rotationzoo.recipe import SELF, Recipe
from rotationzoo.words import counted

UNRECORDED = "a device that nobody recorded"
_LIBRARIES = ("torch", "transformers", "python")


def reproduction_section(manifest: Manifest, recipe: Recipe) -> str:
    """The section with the command that writes the same bytes on a machine of the same kind with
    as many threads; empty for imported files."""
    command = reproduce_command(manifest)
    if command is None:
        return ""
    file = ""
    if RECIPE_FILE in command:
        file = f" Save the recipe below as {RECIPE_FILE} first."
    if recipe.needs_statistics:
        machine = "On a machine of the same kind, with as many threads and the same versions, it "
        machine += "writes these bytes"
        words = f"{machine}: the sha256 of `rotations.safetensors` is below.{file}"
    else:
        words = f"It reads no text, and writes these bytes wherever it runs.{file}"
    return f"""## How to make it again

    {command}

{words}

"""


def provenance_section(manifest: Manifest) -> str:
    """The section on who made the artifact of what, and how to check it."""
    model = manifest.model
    lines = [_origin(manifest), f"Calibration text: {_describe_text(manifest)}"]
    if model.weights_fingerprint:
        lines.append(f"Weights of the model: fingerprint `{model.weights_fingerprint}`")
    lines.append(
        "Signature: `model.sig`, if it is here; `rotationzoo verify FOLDER --require-signature` "
        "says whose it is, and refuses an artifact without one"
    )
    points = "\n".join(f"* {line}" for line in lines)
    return f"## Provenance\n\n{points}\n"


def _origin(manifest: Manifest) -> str:
    version = f"rotationzoo {manifest.versions.rotationzoo}"
    if manifest.imported is None:
        name = manifest.recipe["name"]
        return f"Made by {version} with the recipe `{name}` {_describe_run(manifest)}"
    files = manifest.imported.files.values()
    sources = ", ".join(f"`{file.name}` (sha256 `{file.sha256}`)" for file in files)
    return f"Imported by {version}, matrices unchanged, from\n{sources}"


def _describe_run(manifest: Manifest) -> str:
    """The machine, the time, and the versions of the libraries."""
    run = manifest.run
    threads = manifest.identity.get("threads")
    with_threads = f" with {threads} threads" if threads else ""
    versions = manifest.versions.model_dump()
    names = ", ".join(f"{name} {versions[name]}" for name in _LIBRARIES if name in versions)
    return f"on {run.device or UNRECORDED}{with_threads}, in {run.seconds:.1f} s ({names})"


def _describe_text(manifest: Manifest) -> str:
    if manifest.imported is not None:
        said = _said_by_files(manifest.imported)
        return f"not known to rotationzoo; the imported files say: {said}"
    text = manifest.calibration
    if text is None:
        return "none: the rotation does not depend on data"
    source, ids = _source(text), f"(sha256 of the ids `{text.fingerprint}`)"
    return f"{counted(text.tokens, 'token')} of {source} in {counted(text.rows, 'row')} {ids}"


def _said_by_files(imported: Imported) -> str:
    said = ", ".join(f"{name} {value}" for name, value in imported.calibration.items())
    return said or "nothing"


def _source(text: Calibration) -> str:
    if text.source != SELF:
        return f"`{text.source}`"
    return f"prompts of `{text.prompts}` and of what the model made of them ({text.sampling}),"
