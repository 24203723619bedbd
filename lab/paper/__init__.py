"""The paper's evaluation by simulation: the engine and its schedulers on virtual devices (section 6)."""
