"""INT8: calibration, rotation, SmoothQuant, explicit Q/DQ, and the gates that say what it costs."""
