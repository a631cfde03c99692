"""Training commands. Recipes for each trained model are in recipes/, the shared training code is in core/."""
