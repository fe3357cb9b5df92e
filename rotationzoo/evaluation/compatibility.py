"""Whether layers and artifacts fit the model that is evaluated: what is refused, and what the
reader of the report is told."""

from rotationzoo.artifact.store import Artifact
from rotationzoo.errors import RotationZooError, UsageError
from rotationzoo.model import centering
from rotationzoo.model.geometry import Geometry, same_shapes, shifted_layers
from rotationzoo.model.source import Source, config_hash, weights_fingerprint
from rotationzoo.text.rows import Corpus


def check_layers(model: str, layers: set[int], geometry: Geometry) -> None:
    """Raise `UsageError` for layers without attention, and for those that read the cache of another
    layer."""
    owners = {layer.index: layer.owner for layer in geometry}
    if unknown := layers - owners.keys():
        known = _describe_layers(set(owners))
        raise UsageError(f"{model} has no attention in layer {min(unknown)}: it has layers {known}")
    # What several layers read is stored once, with the rotations of the layer that owns it.
    sharing = sorted(layer for layer in layers if owners[layer] != layer)
    if sharing:
        owner = owners[sharing[0]]
        raise UsageError(
            f"layer {sharing[0]} of {model} stores nothing: it reads the cache of layer {owner}",
            hint=f"name that layer: --layers {owner}",
        )


def check_artifacts(model: str, artifacts: list[Artifact], geometry: Geometry) -> None:
    """Raise `RotationZooError` for artifacts that are bound to no model, or made for one of other
    shapes."""
    for artifact in artifacts:
        if not artifact.bound:
            raise RotationZooError(
                f"{artifact.folder} is bound to no model",
                hint=f"import its files again with --model {model}",
            )
        if not same_shapes(artifact.geometry, geometry):
            raise RotationZooError(
                f"{artifact.folder} was made for a model of other layers, heads or dimensions than "
                f"{model}: {artifact.manifest.model.id}",
                hint=f"make one with: rotationzoo calibrate {model}",
            )


def notes_for_reader(
    text: Corpus, source: Source, artifacts: list[Artifact], geometry: Geometry
) -> list[str]:
    """What the reader of the figures should know: text that fell short, and artifacts that are not
    at home in this model or were calibrated on this text."""
    notes = []
    if text.note:
        notes.append(text.note)
    for artifact in artifacts:
        name, calibrated_model = artifact.folder.resolve().name, artifact.manifest.model
        if _of_other_weights(artifact, source):
            notes.append(f"{name} was made for other weights than these: {calibrated_model.id}")
        calibration = artifact.manifest.calibration
        if calibration is not None and calibration.fingerprint == text.fingerprint:
            notes.append(f"{name} was calibrated on this very text")
        if artifact.recipe.center_keys and (layers := shifted_layers(geometry)):
            reason = centering.reason(layers)
            notes.append(f"{name} centres keys, which this model does not bear: {reason}")
    return notes


def _of_other_weights(artifact: Artifact, source: Source) -> bool:
    """Whether an artifact was made for another config or other weights, as far as that is known."""
    model = artifact.manifest.model
    if model.config_sha256 != config_hash(source):
        return True
    fingerprint = model.weights_fingerprint
    # Imported files do not always say which weights they are of.
    return bool(fingerprint) and fingerprint != weights_fingerprint(source)


def _describe_layers(layers: set[int]) -> str:
    """`0 to 27`, or a list where some are missing in between."""
    first, last = min(layers), max(layers)
    if layers == set(range(first, last + 1)):
        return f"{first} to {last}"
    return str(sorted(layers))
