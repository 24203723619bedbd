"""Plans of a deployment: memory, splits and expected times of a model on devices that need not be there."""
