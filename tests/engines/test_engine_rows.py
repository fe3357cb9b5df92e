"""The rows of `codec.engine_needs`: what else names engines agrees with them."""

import re

from engines_table import PAGE, current_table, table
from support.engine_artifacts import WRITTEN, base_for, exported
from support.recipes import QUICK

from rotationzoo.cli.app import COMMANDS
from rotationzoo.codec.engine_needs import ENGINE_NAMES, ENGINES
from rotationzoo.codec.formats import FORMATS
from rotationzoo.engines.export import launch_line
from rotationzoo.recipe.loading import PRESETS


def test_every_row_has_files_or_a_command_of_ours():
    assert [name for name, entry in ENGINES.items() if entry.command] == ["vllm", "transformers"]
    for name, entry in ENGINES.items():
        assert bool(entry.module) != (entry.command in COMMANDS), name
        assert entry.recipe in PRESETS
        assert entry.format in ("", *FORMATS)


def test_a_card_names_engines_that_there_are(made):
    """It may leave a new engine out: published cards must not change with every engine."""
    card = made(recipe=QUICK, head_dim=128).folder / "README.md"
    line = re.search(r"--for (\S+) +# or ([\w., ]+)", card.read_text(encoding="utf-8"))
    named = [line[1], *line[2].strip().split(", ")]
    assert len(named) > 1
    assert set(named) <= set(ENGINE_NAMES)


def test_the_table_of_the_engines_page_is_the_code_s():
    assert current_table(PAGE.read_text(encoding="utf-8")) == table(), "run: make docs"


def test_the_engines_page_says_what_the_code_does(made, tmp_path):
    """Each engine has a row in both tables, and the launch line that export prints."""
    page = PAGE.read_text(encoding="utf-8")
    heads = made(recipe=QUICK, head_dim=128)
    latents = made("deepseek_v3", QUICK, kv_lora_rank=512)
    for engine in (*WRITTEN, "modelopt", "sglang-mla"):
        artifact = latents if engine == "sglang-mla" else heads
        rows = re.findall(rf"^\| `{re.escape(engine)}` \|", page, re.MULTILINE)
        assert len(rows) == 2, f"{engine}: what `--for` picks, and what it reads"
        changes = {}
        if ENGINES[engine].needs_base:
            changes["base"] = base_for(artifact, tmp_path)
        done = exported(engine, artifact, tmp_path / engine, **changes)
        line = launch_line(done.launch).replace(str(done.path.absolute()), "FOLDER")
        assert re.sub(r"tiny/\w+", "MODEL", line) in page, line
        assert not [note for note in done.launch.notes if "unpacked" in note]
