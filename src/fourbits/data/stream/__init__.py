"""From token files to samples: the file format, the blend, the shuffle, and the stream a run reads."""
