"""INT8: calibration, SmoothQuant, explicit Q/DQ, and the gates that say what it costs."""
