"""What all tables of recipe keys share: they are immutable and refuse unknown keys."""

from collections.abc import Iterable

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A table of recipe keys. It is immutable and refuses unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    def keys_at_default(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys whose values are their defaults."""
        fields = type(self).model_fields
        return {key for key in keys if getattr(self, key) == fields[key].default}
