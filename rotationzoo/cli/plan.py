"""`rotationzoo plan`: what a model's weights and cache take, and what fits a GPU."""

import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rotationzoo.cli.next_steps import named, retyped, shell_line
from rotationzoo.cli.options import Json, ModelName, Revision, RopeScaling, option
from rotationzoo.cli.output import Output, hush_libraries, say, show_lines, table
from rotationzoo.codec.formats import FORMATS
from rotationzoo.figures import size_words
from rotationzoo.words import counted

if TYPE_CHECKING:
    from rotationzoo.capacity.plan import Answer, Capacity

_PULLED = ("rotationzoo", "oscar")  # formats of entries that `pull` fetches


def plan_command(
    model: ModelName,
    gpu: Annotated[str, option("A card or its memory: RTX 4090, H100, 24GiB, 2x24GiB.")] = "24GiB",
    gpus: Annotated[int, option("How many of it share the model.", min=1)] = 1,
    context: Annotated[
        int | None, option("Tokens of each request (131072, at most the model's positions).", min=1)
    ] = None,
    requests: Annotated[int, option("Requests at the same time.", min=1)] = 1,
    format: Annotated[
        Literal["sglang", "vllm", "mlx"],
        option("Whose 2-bit format: it decides the size of scales and offsets."),
    ] = "sglang",
    sink: Annotated[int, option("First tokens kept exact.", min=0)] = 64,
    recent: Annotated[int, option("Last tokens kept exact.", min=0)] = 256,
    revision: Revision = None,
    rope_scaling: RopeScaling = None,
    json: Json = False,
    quiet: Annotated[bool, option("Print the answer in one line.", "--quiet", "-q")] = False,
) -> None:
    """Show what a model's weights and cache take, and what fits a GPU.

    It reads the config alone. The answer is for bf16, fp8, int4 and int2 caches, and for weights as
    published and in 4 bits.

    rotationzoo plan Qwen/Qwen3-8B

    rotationzoo plan meta-llama/Llama-3.3-70B-Instruct --gpu "2x RTX 3090" --format vllm

    rotationzoo plan Qwen/Qwen3-4B --gpu H200 --context 100000 --requests 256
    """
    out = Output(json, quiet)
    from rotationzoo.capacity.cards import parse_card, several
    from rotationzoo.capacity.plan import Wish, measure_capacity
    from rotationzoo.capacity.shape import Storage
    from rotationzoo.recipe.loading import PRESETS, with_rope_scaling

    recipe = with_rope_scaling(PRESETS["oscar"], rope_scaling)
    card = several(parse_card(gpu), gpus)
    hush_libraries()
    storage = Storage(FORMATS[format], sink, recent)
    wish = Wish(model, context, requests, card, storage, revision, recipe.rope_scaling)
    show_capacity(out, measure_capacity(wish), format, recipe.name)


def show_capacity(out: Output, capacity: "Capacity", format: str, recipe: str) -> None:
    """Print the plan for a wish, with commands for a recipe: tables, a line, or a JSON object."""
    from rotationzoo.capacity.plan import capacity_json, judge_wish, remarks, zoo_entries

    answer = judge_wish(capacity, capacity.wish.card)
    entries = zoo_entries(capacity)
    commands = _commands(capacity, format, recipe)
    notes = remarks(capacity)
    data = {
        **capacity_json(capacity),
        "format": format,
        "fits": answer.cache is not None,
        "answer": answer.words,
        "needs": {"weights": answer.weights, "cache": answer.cache},
        "remarks": notes,
        "zoo": entries,
        "commands": commands,
    }

    def show() -> None:
        say(answer.words, *(f"Note: {note}" for note in notes), "")
        _show_sizes(capacity, data, format)
        _show_cards(data)
        say("")
        for entry in entries:  # of the packaged index; `pull` cannot fetch all of them
            line = f"Published rotations: {entry['recipe']}, at {entry['copies'][0]['repo']}"
            if entry["format"] in _PULLED:
                line += f"; fetch them with: rotationzoo pull {entry['model']}"
            say(line)
        _show_steps(answer, commands, capacity.wish.model)

    out.result(data, answer.words, show)
    if any(entry["format"] in _PULLED for entry in entries):
        out.suggest("pull", *named(capacity.wish.model, None, capacity.wish.rope_scaling))
    elif answer.context:
        out.suggest(*retyped({"--context": str(answer.context)}))
    elif answer.cache is not None and commands:
        out.suggest(*shlex.split(commands[0])[1:])


def _show_sizes(capacity: "Capacity", data: dict[str, Any], format: str) -> None:
    weights = data["weights_bytes"]
    published, four_bit = size_words(weights["published"]), size_words(weights["4bit"])
    kind = counted(data["layers"], "layer")
    if data["sliding_layers"]:
        kind += f" ({data['sliding_layers']} with a sliding window)"
    kind += " with a cache"
    if capacity.caches_latents:
        kind += " of latents"
    parameters = f"{data['parameters'] / 1e9:.1f} billion"
    if data["parameters"] < 1e9:
        parameters = f"{data['parameters'] / 1e6:.1f} million"
    say(f"{data['model']}: {kind}, {parameters} parameters")
    say(f"Weights: {published} as published, {four_bit} in 4 bits")
    rows = []
    for cache, size in data["kv_bytes_per_request"].items():
        bytes_per_token = f"{data['kv_bytes_per_token'][cache]:,.0f}"
        all_requests = size_words(size * data["requests"])
        rows.append([cache, bytes_per_token, size_words(size), all_requests])
    columns = ["cache", "bytes a token", "one request", counted(data["requests"], "request")]
    if data["requests"] == 1:  # the last column would repeat the one before
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    table(f"Cache of a request of {data['context']:,} tokens", columns, rows, apart=True)
    say(
        f"int2: the format of {format}, {data['sink']} first and {data['recent']} last tokens "
        f"exact, {data['bits_per_element']:.2f} bits an element"
    )


def _show_cards(data: dict[str, Any]) -> None:
    """What the chosen card holds, and the other cards with a row for each kind of weights."""
    from rotationzoo.capacity.cards import USABLE

    chosen, requests = data["gpu"], f"requests of {data['context']:,}"
    rows = []
    for name, fitting in _different_weights(data, chosen):
        for cache in fitting["max_context"]:
            rows.append([name, cache, *_fitting_cells(fitting, [cache])])
    usable = size_words(chosen["usable_bytes"])
    title = f"{chosen['name']}: {usable} for weights and cache ({USABLE:.0%} of it)"
    table(title, ["weights", "cache", "longest request", requests], rows, apart=True)
    rows = []
    for card in data["cards"]:
        for name, fitting in _different_weights(data, card):
            if fitting["fit"]:
                rows.append([card["name"], name, *_fitting_cells(fitting, ["bf16", "int2"])])
    if not rows:
        say("", "None of the cards known here holds the weights alone, not even in 4 bits")
        return
    columns = ["card", "weights", "longest bf16", "int2", "fit bf16", "int2"]
    table("Cards that hold the weights", columns, rows, apart=True)
    say(f"longest: tokens of one request; fit: {requests} tokens")


def _different_weights(
    data: dict[str, Any], card: dict[str, Any]
) -> list[tuple[str, dict[str, Any]]]:
    """What fits a card, for each kind of weights; only one if the published have 4 bits."""
    sizes, fitting = data["weights_bytes"], card["weights"]
    named = [("published", fitting["published"]), ("4 bits", fitting["4bit"])]
    return named[:1] if sizes["4bit"] == sizes["published"] else named


def _fitting_cells(fitting: dict[str, Any], caches: list[str]) -> list[str]:
    """The longest requests in some caches, and then how many requests fit."""
    cells = []
    for key in ("max_context", "max_requests"):
        for cache in caches:
            count = fitting[key][cache]
            cells.append("any" if count is None else f"{count:,}")
    return cells


def _show_steps(answer: "Answer", commands: list[str], model: str) -> None:
    """What makes the weights and the cache of the answer, and then the 2-bit cache."""
    if answer.weights == "4bit":
        say(
            "Weights in 4 bits: a published AWQ or GPTQ copy of the model, or one that "
            "llm-compressor makes of it (scheme W4A16)"
        )
    if answer.cache == "fp8":
        say("A cache in fp8 is an option of the engine, such as:")
        show_lines(f"  {shlex.join(['vllm', 'serve', model, '--kv-cache-dtype', 'fp8'])}")
    if answer.cache is not None and commands:
        say("A cache in int2:")
        show_lines(*(f"  {command}" for command in commands))


def _commands(capacity: "Capacity", format: str, recipe: str) -> list[str]:
    """The commands that lead to the 2-bit cache of the plan."""
    from rotationzoo.storage.folders import default_output

    wish, storage = capacity.wish, capacity.wish.storage
    artifact = str(default_output(wish.model, recipe))
    model = named(wish.model, wish.revision, wish.rope_scaling)
    generate = ["generate", *model, "--rotations", artifact]
    export = ["export", artifact, "--for", format]
    if format != "sglang":
        generate += ["--format", format]
    windows = f"{storage.sink}/{storage.recent}"
    if windows != "64/256":
        generate += ["--sink", str(storage.sink), "--recent", str(storage.recent)]
    if format == "vllm":  # `serve` takes the windows
        export = ["serve", *model, "--rotations", artifact]
        export += generate[generate.index("--sink") :] if "--sink" in generate else []
    elif windows != "64/256":
        export += ["--windows", windows]
    commands = [["calibrate", *model], generate]
    # Engines with these formats take no latents, and `serve` no scaled RoPE.
    if not (capacity.caches_latents or (wish.rope_scaling and format == "vllm")):
        commands.append(export)
    return [shell_line(*words) for words in commands]
