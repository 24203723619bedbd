"""`orca-jax calibrate`: fits a calibration of decisions to labelled rows."""
