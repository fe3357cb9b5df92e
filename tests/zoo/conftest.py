from support.zoo_models import model  # noqa: F401
