"""Post-training algorithms: their mathematics and their drivers."""
