"""Models of the Hugging Face Hub: names, downloads, and checks of a server's answers."""

from orca_jax.helpers.hub.models import INDEX, SETTINGS, SINGLE, HubModel, download, is_hub_name

__all__ = ["INDEX", "SETTINGS", "SINGLE", "HubModel", "download", "is_hub_name"]
