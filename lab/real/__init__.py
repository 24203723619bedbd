"""The paper's evaluation on a real engine: Figures 9, 10 and 11 with the lengths of its trace, scaled to the model."""
