"""Token streams: from text files to exact, phased, resumable samples; knows nothing of models."""
