"""Commands that are there to be copied."""

import shlex

from rotationzoo.cli.export_view import fold_command


def test_a_long_command_has_a_flag_a_line_and_is_the_same_command():
    command = "python -m sglang.launch_server --model-path 'my --model' --kv-cache-dtype int2"
    command += " --kv-cache-quant-group-size 64"
    folded = fold_command(command)
    assert max(map(len, folded)) < 80
    assert shlex.split("\n".join(folded).replace("\\\n", "")) == shlex.split(command)
    assert fold_command("vllm serve x --y") == ["vllm serve x --y"]
    python = f"config = OscarConfig(group_size=64, note='--x', rotation_dir=Path(\"{'p' * 80}\"))"
    assert fold_command(python) == [python]
    assert fold_command(f"# a comment --{'x' * 90}") == [f"# a comment --{'x' * 90}"]
