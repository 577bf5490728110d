"""Rewards that are not the model: verifiers of answers, and the processes in which they run.

``math``, ``formats``, ``lengths``, ``repetition`` and ``code`` are pure functions of an answer; ``parts`` is how a
recipe names them; ``sandbox`` runs submitted programs; ``pool`` runs everything in worker processes with hard limits.
Importing this package loads none of them, and no torch.
"""
