"""From token files to samples: the layout, the blend, the shuffle, and the stream a run reads."""
