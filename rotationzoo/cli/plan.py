"""`rotationzoo plan`: what a model's weights and cache take, and what fits a GPU."""

from typing import Annotated, Literal

from rotationzoo.cli.library_logs import hush_libraries
from rotationzoo.cli.options import Json, ModelName, Revision, option
from rotationzoo.cli.output import Output


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
    from rotationzoo.capacity.cache_bytes import Storage
    from rotationzoo.capacity.cards import parse_card, several
    from rotationzoo.capacity.job import Wish, measure_capacity
    from rotationzoo.cli.plan_view import show_capacity
    from rotationzoo.codec.formats import FORMATS

    card = several(parse_card(gpu), gpus)
    hush_libraries()
    storage = Storage(FORMATS[format], sink, recent)
    wish = Wish(model, context, requests, card, storage, revision)
    show_capacity(out, measure_capacity(wish), format)
