"""What all tables of recipe keys share: they are immutable and refuse unknown keys, and their
numbers have ranges."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""As torch takes it, and as JSON of 64 bits holds it."""
Count = Annotated[int, Field(gt=0, le=10**6)]
Tokens = Annotated[int, Field(gt=0, le=10**8)]
"""Tokens to read: 3,000 times what a preset does."""
Window = Annotated[int, Field(ge=0, le=10**9)]


class Section(BaseModel):
    """A table of recipe keys. It is immutable and refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())
