"""Low-rank adapters (LoRA): their files, their places on the devices, and their part in the layers."""
