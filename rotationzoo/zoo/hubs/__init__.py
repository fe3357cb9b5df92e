"""Hugging Face and ModelScope behind one small protocol: where the head is, what it holds, fetch,
publish.

Clients are imported when they are used. What they retry and what they do not is known from trying
every fault against them: Hugging Face's client does not retry a 503 on a file's body or on a
commit, and checks the size of what it fetched, not its hash. So calls are repeated here, and hashes
are checked by the caller.
"""

from rotationzoo.zoo.hubs.huggingface import HuggingFace
from rotationzoo.zoo.hubs.modelscope import ModelScope
from rotationzoo.zoo.hubs.protocol import SPELLING, Hub, Listed, Published

__all__ = ["SPELLING", "TITLES", "Hub", "HuggingFace", "Listed", "ModelScope", "Published", "hub"]

TITLES = {"huggingface": "Hugging Face", "modelscope": "ModelScope"}


def hub(name: str) -> Hub:
    return {"huggingface": HuggingFace, "modelscope": ModelScope}[name]()
