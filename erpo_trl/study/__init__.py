"""The study: questions about ERPO, each with a claim, runs over several seeds, and an answer with intervals."""
