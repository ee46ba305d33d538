"""Running a bundle: sessions, sampling, streaming text. Only torch_session needs torch."""
