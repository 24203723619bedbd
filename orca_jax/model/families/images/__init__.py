"""Models for images and texts, of which the part for texts is served."""
