"""What shells offer when the tab key is pressed, through the protocol of their own scripts."""

import pytest
from support.command_line import run_apart

from rotationzoo.cli.completion import RECIPES, TASKS
from rotationzoo.engines.registry import ENGINE_NAMES
from rotationzoo.recall import prompts
from rotationzoo.recipe import PRESETS
from rotationzoo.zoo import index


@pytest.fixture
def complete(inside, monkeypatch):
    """`complete("inspect ro")` gives what bash is told about the last word."""

    def run(words: str) -> list[str]:
        typed = f"rotationzoo {words}".split(" ")
        monkeypatch.setenv("_ROTATIONZOO_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", " ".join(typed))
        monkeypatch.setenv("COMP_CWORD", str(len(typed) - 1))
        return inside().stdout.split()

    run.folder = inside.folder
    return run


def put_artifact(folder):
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_names_that_are_listed_twice_agree():
    assert set(RECIPES) == set(PRESETS)
    assert set(TASKS) == set(prompts.TASKS)


def test_presets_recipe_files_and_texts(complete):
    assert complete("calibrate demo --recipe osc") == ["oscar", "oscar-v1"]
    (complete.folder / "configs").mkdir()
    (complete.folder / "configs" / "mine.yaml").touch()
    (complete.folder / "texts.jsonl").touch()
    assert complete("calibrate demo --recipe con") == ["configs/mine.yaml"]
    assert complete("calibrate demo --data ") == ["bundled", "texts.jsonl"]


def test_artifacts_here_and_below(complete):
    put_artifact(complete.folder / "rotations" / "demo-oscar")
    put_artifact(complete.folder / "mine")
    put_artifact(complete.folder / "other" / "[x]")
    put_artifact(complete.folder / "rotations" / "\x1b[2J")
    (complete.folder / "rotations" / "no-artifact").mkdir()
    assert complete("inspect ") == ["rotations/demo-oscar", "mine"]
    assert complete("evaluate demo mi") == ["mine"]
    assert complete("verify other/[") == ["other/[x]"]
    rotations = complete("generate demo --rotations ")
    assert rotations[:2] == ["rotations/demo-oscar", "mine"]
    assert {"none", "Qwen/Qwen3-8B"} <= set(rotations)


def test_models_and_published_recipes(complete):
    assert complete("calibrate d") == ["demo"]
    assert "Qwen/Qwen3-8B" in complete("pull Qwen/")
    assert "demo" not in complete("pull ")
    entries = [entry for entry in index.read(index.WHEEL_COPY).entries if entry.pullable]
    recipes = [entry.recipe for entry in entries]
    assert complete("pull Qwen/Qwen3-8B --recipe ") == list(dict.fromkeys(recipes))


def test_engines_tasks_cards_and_indices(complete):
    assert complete("export x --to ") == list(ENGINE_NAMES)
    assert complete("evaluate demo --tasks needles,k") == ["needles,key-value"]
    assert "needles,needles" not in complete("evaluate demo --tasks needles,")
    assert complete("plan demo --gpu H") == ["H100", "H200"]
    assert complete("list --index b") == ["bundled"]
    assert complete("pu") == ["pull", "push"]


def test_what_nothing_knows_is_left_to_the_shell(complete):
    assert complete("calibrate ./my") == []


def test_a_shell_does_not_wait_for_torch():
    typed = {"_TYPER_COMPLETE_ARGS": "rotationzoo pull Qwen/Qwen3-8"}
    offered, imported = run_apart(_ROTATIONZOO_COMPLETE="complete_zsh", **typed)
    assert any("Qwen/Qwen3-8B" in line for line in offered)
    assert not imported & {"torch", "transformers", "huggingface_hub", "numpy"}
